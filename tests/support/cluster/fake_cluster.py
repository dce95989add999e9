"""A coordinator in this process with scripted workers and a client; leaving it checks that nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from coordinator.service import Coordinator, running_coordinator
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import SplitserveError
from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import generation_pb2, inference_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.cluster.fake_workers import FIRST_TOKEN, FakeDecode, FakePrefill, FakeWorker
from tests.support.engine.word_tokenizer import load_word_tokenizer
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S


class FakeCluster:
    """A coordinator with its fake workers, and a client."""

    def __init__(self, coordinator: Coordinator, channel: grpc.aio.Channel) -> None:
        self.coordinator = coordinator
        self.address = f"127.0.0.1:{coordinator.port}"
        self.client = InferenceServiceStub(channel)
        self.prefills: list[FakePrefill] = []
        self.decodes: list[FakeDecode] = []

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefills, *self.decodes]

    def decode_of(self, agent_id: str) -> FakeDecode:
        return next(worker for worker in self.decodes if worker.agent_id == agent_id)

    async def add_prefill(self, name: str, **registered: Any) -> FakePrefill:
        worker = FakePrefill(name, self.address, self.decode_of, **registered)
        self.prefills.append(worker)
        await worker.start()
        return worker

    async def add_decode(self, name: str, **registered: Any) -> FakeDecode:
        worker = FakeDecode(name, self.address, **registered)
        self.decodes.append(worker)
        await worker.start()
        return worker

    async def all_ready(self) -> None:
        def ready() -> bool:
            snapshot = self.coordinator.registry.snapshot()
            pairs = [
                p.reaches(d) for p in snapshot.workers for d in snapshot.workers if (p.role, d.role) == POOLS
            ]
            return (
                len(snapshot.workers) == len(self.workers)
                and all(pairs)
                and all(w.accepts for w in snapshot.workers)
            )

        await settled(ready)

    def call(
        self, request: inference_pb2.GenerateRequest | None = None, timeout: float | None = PATIENCE_S
    ) -> Any:
        return self.client.Generate(request or ask(), timeout=timeout)

    async def answer(self, request: inference_pb2.GenerateRequest | None = None) -> Collected:
        return await collect(self.call(request))

    async def error(
        self, request: inference_pb2.GenerateRequest, timeout: float | None = PATIENCE_S
    ) -> SplitserveError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(self.call(request, timeout))
        return error_from_rpc(caught.value)


class Collected:
    """An answer, checked for gaps and duplicates as it came in."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.done: inference_pb2.GenerationDone | None = None
        self.deltas: list[generation_pb2.OutputDelta] = []

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        assert self.done is None
        if response.HasField("done"):
            self.done = response.done
            return
        assert response.delta.first_position == len(self.token_ids)
        self.token_ids.extend(response.delta.token_ids)
        self.text += response.delta.text
        self.deltas.append(response.delta)


POOLS = ("prefill", "decode")


def ask(max_tokens: int = 6, text: str = "w1 w2 w3", **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        text=text, stop=generation_pb2.StopParams(max_tokens=max_tokens), **fields
    )


def expected(count: int) -> list[int]:
    return list(range(FIRST_TOKEN, FIRST_TOKEN + count))


async def collect(call: Any) -> Collected:
    return await finish(call, Collected())


async def finish(call: Any, answer: Collected) -> Collected:
    """Reads to the end. (gRPC lets nobody mix `read` and iteration on one call.)"""
    while (response := await call.read()) is not grpc.aio.EOF:
        answer.add(response)
    return answer


async def read(call: Any, answer: Collected, tokens: int) -> None:
    """Reads on until the answer has so many tokens."""
    while len(answer.token_ids) < tokens:
        answer.add(await call.read())


@asynccontextmanager
async def fake_cluster(prefill: int = 1, decode: int = 1, **config: Any) -> AsyncIterator[FakeCluster]:
    before = asyncio.all_tasks()
    defaults = {"grpc_port": 0, "http_port": None, "no_worker_wait_s": 0.5, "drain_s": 5.0}
    # On a busy machine forecasts are high; no burst is refused for that where a test says nothing else.
    admission = {"max_queue_s": 600.0} | config.pop("admission", {})
    settings = CoordinatorConfig(**(defaults | config), admission=admission)
    async with (
        running_coordinator(settings, load=load_word_tokenizer) as coordinator,
        make_channel(f"127.0.0.1:{coordinator.port}") as channel,
    ):
        cluster = FakeCluster(coordinator, channel)
        try:
            for number in range(decode):
                await cluster.add_decode(f"d{number}")
            for number in range(prefill):
                await cluster.add_prefill(f"p{number}")
            await cluster.all_ready()
            await asyncio.wait_for(channel.channel_ready(), PATIENCE_S)
            yield cluster
            await settled(lambda: coordinator.api.running == 0 and coordinator.background.count == 0)
            await settled(lambda: all(worker.open_rpcs.count == 0 for worker in cluster.workers))
        finally:
            for worker in cluster.workers:
                await worker.stop()
    await settled(lambda: not asyncio.all_tasks() - before)


@asynccontextmanager
async def slow_client(cluster: FakeCluster) -> AsyncIterator[InferenceServiceStub]:
    """A client whose receive window stays small, so that not reading is felt by the server."""
    options = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 2**16),
        ("grpc.max_receive_message_length", 2**24),
    ]
    async with grpc.aio.insecure_channel(cluster.address, options=options) as channel:
        yield InferenceServiceStub(channel)
