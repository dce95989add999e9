"""A server that gets random and damaged messages: whatever comes, it ends calls with a typed error and works on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from tests.support.clients.fuzz import (
    Loop,
    as_they_are,
    changed,
    damaged,
    ending,
    exchange,
    raw_channel,
    settle_for_long_run,
    tell_stall,
)
from tests.support.cluster.fake_cluster import FakeCluster, ask, expected, fake_cluster
from tests.support.journal import settled

Code = grpc.StatusCode
TYPED = frozenset(
    {
        Code.OK,
        Code.INVALID_ARGUMENT,
        Code.NOT_FOUND,
        Code.RESOURCE_EXHAUSTED,
        Code.FAILED_PRECONDITION,
        Code.DEADLINE_EXCEEDED,
        Code.PERMISSION_DENIED,
    }
)
CALL_S = 10.0


def bytes_of(pick: random.Random, valid: Message) -> bytes:
    """A changed copy, one in four damaged too."""
    data = changed(pick, valid).SerializeToString()
    return damaged(pick, data) if pick.random() < 0.25 else data


@dataclass
class Target:
    """What is fuzzed: a channel that takes raw bytes, and how calls ended."""

    loop: Loop
    channel: grpc.aio.Channel
    codes: Counter[str] = field(default_factory=Counter)

    def send(self, method: str, data: bytes, *, streams: bool = False, limit_s: float = CALL_S) -> None:
        code, details = self.loop.run(self._send(method, data, streams, limit_s))
        self._ended(method, code, details, data)

    def send_stream(
        self, channel: grpc.Channel, method: str, messages: list[bytes], limit_s: float
    ) -> list[bytes]:
        """Sends all messages of a stream; returns what was answered."""
        code, details, answers = exchange(channel, method, messages, limit_s)
        self._ended(method, code, details, messages)
        return answers

    def _ended(self, method: str, code: Code, details: str, sent: bytes | list[bytes]) -> None:
        self.codes[f"{method.rsplit('/', 1)[1]} {code.name}"] += 1
        assert code in TYPED, f"{method}: {code}: {details}\n{sent!r}"

    async def _send(self, method: str, data: bytes, streams: bool, limit_s: float) -> tuple[Code, str]:
        make = self.channel.unary_stream if streams else self.channel.unary_unary
        call: Any = make(method, request_serializer=as_they_are, response_deserializer=as_they_are)(
            data, timeout=limit_s
        )
        return await ending(call)


@contextmanager
def fuzzed_coordinator() -> Iterator[tuple[Target, FakeCluster]]:
    """A coordinator with scripted workers."""
    loop = Loop()

    @asynccontextmanager
    async def made() -> AsyncIterator[tuple[Target, FakeCluster]]:
        async with fake_cluster() as cluster, raw_channel(cluster.address) as channel:
            settle_for_long_run(cluster.coordinator.loop_lag)
            yield Target(loop, channel), cluster

    with loop.holding(made) as target:
        yield target
        print(dict(sorted(target[0].codes.items())))


def works(target: Target, cluster: FakeCluster) -> None:
    """A normal request afterwards, and nothing of the others left."""

    async def request() -> None:
        answer = await cluster.answer(ask(max_tokens=5, model="words"))
        assert answer.token_ids == expected(5)
        await settled(lambda: not cluster.coordinator.api.running)
        await settled(lambda: not any(decode.live for decode in cluster.decodes))

    target.loop.run(request())
    tell_stall(cluster.coordinator.loop_lag)
