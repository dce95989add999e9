"""What is asked for beside generated text: models, health, readiness, metrics, version."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from coordinator.front_door import require_admin
from coordinator.openai.endpoint import Call, Desk
from coordinator.openai.fields import compact_json
from splitserve import __version__
from splitserve.errors import NotFoundError, UnavailableError
from splitserve.metrics import Metrics, Read
from splitserve.v1 import inference_pb2


class Pages:
    """`read_metrics` gives what the metrics port shows."""

    def __init__(self, desk: Desk, read_metrics: Read) -> None:
        self._desk = desk
        self._started = int(time.time())
        self._metrics = CollectorRegistry()
        self._metrics.register(Metrics(read_metrics))

    async def models(self, call: Call) -> None:
        """GET /v1/models."""
        found = await self._desk.door.models(self._desk.caller(call))
        await _show(call, {"object": "list", "data": [self._shown(model) for model in found]})

    async def model(self, call: Call) -> None:
        """GET /v1/models/{model}."""
        name = call.path_params["model"]
        for model in await self._desk.door.models(self._desk.caller(call)):
            if model.name == name:
                await _show(call, self._shown(model))
                return
        message = f"model {name[:128]!r} is not served here"
        raise NotFoundError(message, reason="MODEL_NOT_FOUND", field="model")

    async def health(self, call: Call) -> None:
        """GET /health: the process lives."""
        await _show(call, {"status": "ok"})

    async def ready(self, call: Call) -> None:
        """GET /ready: a request sent now has a worker to go to."""
        door = self._desk.door
        if door.draining:
            raise UnavailableError("the coordinator is shutting down", reason="DRAINING")
        snapshot = door.snapshot()
        if not any(snapshot.is_ready(worker) for worker in snapshot.workers):
            message = "no model has a prefill and a decode worker that are ready"
            raise UnavailableError(message, reason="NO_WORKER")
        await _show(call, {"status": "ready"})

    async def version(self, call: Call) -> None:
        """GET /version."""
        self._desk.caller(call)
        await _show(call, {"version": __version__})

    async def metrics(self, call: Call) -> None:
        """GET /metrics, for admins."""
        require_admin(self._desk.caller(call))
        encode, content_type = choose_encoder(call.exchange.header(b"accept") or "")
        # On a thread, as a scrape of the metrics port is: it may take milliseconds.
        text = await asyncio.to_thread(encode, self._metrics)
        await call.exchange.respond(200, text, content_type.encode())

    def _shown(self, model: inference_pb2.ModelInfo) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "splitserve",
            "max_model_len": model.context_tokens,
        }


async def _show(call: Call, value: dict[str, Any]) -> None:
    await call.exchange.respond(200, compact_json(value).encode())
