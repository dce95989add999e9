"""The neutral worker process: its role, made of the roles of both pools, and `serve`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from prometheus_client.core import Metric

from decode_worker.kv_consumer import KvConsumer
from decode_worker.service import DecodeRole
from engine.worker.build import VLLM, EngineParts
from engine.worker.process import WorkerProcess
from engine.worker.role import POOL_NAMES, WorkerRole
from kv_transfer.transports.transport import TransferEndpoint
from neutral_worker.leaning import Leaning
from neutral_worker.neutral_connector import NeutralConnector
from neutral_worker.worker_part import WorkerPart
from prefill_worker.kv_producer import KvProducer
from prefill_worker.service import PrefillRole
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError
from splitserve.logs import log_event
from splitserve.metrics import counter, gauges
from splitserve.rpc.carried_calls import CarriedMethod
from splitserve.v1 import registry_pb2

UNKNOWN_LOGGED_EVERY_S = 60.0


class NeutralRole(WorkerRole[NeutralConnector]):
    """Computes prompts and decodes, whichever way it leans: what a leaning changes is what coordinators send here."""

    certificate = "worker"
    neutral = True

    def __init__(self, worker: WorkerProcess[NeutralConnector]) -> None:
        self._worker = worker
        self._leaning = Leaning(worker.config.leaning)
        self._unknown_logged_s = float("-inf")
        sends: WorkerPart[NeutralConnector, KvProducer] = WorkerPart(worker, lambda whole: whole.producer)
        receives: WorkerPart[NeutralConnector, KvConsumer] = WorkerPart(worker, lambda whole: whole.consumer)
        self._prefill, self._decode = PrefillRole(sends), DecodeRole(receives)

    @property
    def pool(self) -> registry_pb2.Pool.ValueType:
        """See WorkerRole."""
        return self._leaning.pool

    def make_connector(self, parts: EngineParts, epoch: int, on_idle: Callable[[], None]) -> NeutralConnector:
        """See WorkerRole."""
        parts.core.keep_prompt_room()
        producer = self._prefill.make_connector(parts, epoch, on_idle)
        consumer = self._decode.make_connector(parts, epoch, on_idle, producer.polls)
        return NeutralConnector(parts, producer, consumer, on_idle)

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        """See WorkerRole."""
        return [*self._prefill.add_services(server), *self._decode.add_services(server)]

    def carried_methods(self) -> Mapping[str, CarriedMethod]:
        """See WorkerRole."""
        return {**self._prefill.carried_methods(), **self._decode.carried_methods()}

    def on_peers(self, coordinator: str, peers: Sequence[TransferEndpoint]) -> None:
        """See PrefillRole. A worker is no peer of itself."""
        own = self._worker.connector.endpoint.agent_id
        self._prefill.on_peers(coordinator, [peer for peer in peers if peer.agent_id != own])

    def on_ended_writers(self, agent_ids: Sequence[str]) -> None:
        """See DecodeRole."""
        self._decode.on_ended_writers(agent_ids)

    def on_leaning(self, coordinator: str, pool: registry_pb2.Pool.ValueType) -> None:
        """Leans that way at once, and reports it. Requests go on as they are, and either service takes new ones."""
        if pool not in POOL_NAMES:
            self._log_unknown(coordinator, pool)
            return
        before = self._leaning.name
        if self._leaning.follow(pool):
            moved: dict[str, Any] = {"from": before, "to": self._leaning.name}
            log_event(
                "worker.leaning", worker_id=self._worker.config.worker_id, asked_by=coordinator, **moved
            )
            self._worker.report_soon()

    def busy(self) -> bool:
        """See WorkerRole."""
        return self._prefill.busy() or self._decode.busy()

    def metrics(self) -> list[Metric]:
        """See WorkerRole."""
        lean = {name: float(name == self._leaning.name) for name in POOL_NAMES.values()}
        return [
            gauges("splitserve_leaning", "Which pool a neutral worker leans to", "pool", lean),
            counter(
                "splitserve_leaning_changes", "Changes of a neutral worker's leaning", self._leaning.changes
            ),
        ]

    def close(self) -> None:
        """See WorkerRole."""
        self._prefill.close()
        self._decode.close()

    def _log_unknown(self, coordinator: str, pool: int) -> None:
        now = time.monotonic()
        if now - self._unknown_logged_s >= UNKNOWN_LOGGED_EVERY_S:
            self._unknown_logged_s = now
            log_event("worker.leaning_unknown", level=logging.WARNING, asked_by=coordinator, leaning=pool)


def check_neutral(config: WorkerConfig) -> None:
    """Raises ConfigError, naming the field, for settings that a neutral worker cannot run with."""
    if config.engine.kind == VLLM:
        message = (
            "engine.kind: a neutral worker runs engine torch or simulated; start prefill-worker and decode-worker for "
            "engine vllm, whose scheduler keeps no room for prompts"
        )
        raise ConfigError(message, field="engine.kind")
    if config.engine.max_running_requests < 2:
        message = "engine.max_running_requests: a neutral worker needs at least 2, as reservations leave one to prompts"
        raise ConfigError(message, field="engine.max_running_requests")


async def serve(config: WorkerConfig) -> None:
    """Runs a neutral worker until SIGTERM or SIGINT. Raises ConfigError as `check_neutral`."""
    check_neutral(config)
    await WorkerProcess(config, NeutralRole).run()
