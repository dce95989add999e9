"""Whom a worker that starts asks for weights, and what its giver refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.worker.weights import service as module
from engine.worker.weights.pull import PeerWeights
from engine.worker.weights.service import WeightsService
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from kv_transfer.transports.transport import TransferEndpoint
from kv_transfer.weights.manifest import PLAIN, PULL_S, Manifest, TensorSpec, WeightsReader
from kv_transfer.weights.window import PieceWindow
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ResourceExhaustedError, SplitserveError, TransferError, UnavailableError
from splitserve.v1 import registry_pb2, weights_pb2
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

SPECS = (TensorSpec("one", (3000,), "float32"),)
A, B = (registry_pb2.WeightsHolder(worker_id=name) for name in "ab")
pytestmark = pytest.mark.timeout(LEAST_TIMEOUT_S)


class Peers:
    """Holders, what becomes of each pull from them, and seconds that pass while somebody waits."""

    def __init__(
        self, *holders: registry_pb2.WeightsHolder, **outcomes: list[SplitserveError | None]
    ) -> None:
        self.holders, self.outcomes = holders, outcomes
        self.asked: list[str] = []
        self.now_s = 0.0
        self.source = PeerWeights(lambda: self.holders, self.pull, lambda: self.now_s, self.wait)

    def pull(
        self, holder: registry_pb2.WeightsHolder, _specs: Any, _allocate: Any, _form: Any, limit_s: float
    ) -> Manifest:
        self.asked.append(holder.worker_id)
        assert limit_s == PULL_S - self.now_s
        outcomes = self.outcomes[holder.worker_id]
        error = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
        if error is not None:
            raise error
        return Manifest(f"of {holder.worker_id}", "agent", SPECS)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def fetch(self) -> str:
        def allocate(spec: TensorSpec) -> Any:
            return np.zeros(spec.num_bytes, np.uint8)

        return self.source.fetch(SPECS, allocate, PLAIN).fingerprint


BUSY = ResourceExhaustedError("busy", reason="WEIGHTS_BUSY")


def test_the_first_that_gives_is_taken() -> None:
    assert Peers(A, B, a=[None], b=[None]).fetch() == "of a"
    assert Peers(A, B, a=[TransferError("gone")], b=[None]).fetch() == "of b"
    assert Peers(A, B, a=[BUSY], b=[None]).fetch() == "of b"


def test_a_worker_waits_while_all_are_busy_and_not_for_ever() -> None:
    later = Peers(A, a=[BUSY, BUSY, None])
    assert later.fetch() == "of a"
    assert later.asked == ["a", "a", "a"]
    never = Peers(A, B, a=[BUSY], b=[BUSY])
    with pytest.raises(ResourceExhaustedError):
        never.fetch()
    assert 60 <= never.now_s < 65


def test_a_fault_is_not_tried_again() -> None:
    peers = Peers(A, B, a=[BUSY], b=[TransferError("gone")])
    with pytest.raises(TransferError):
        peers.fetch()
    assert peers.asked == ["a", "b"]


def test_nobody_gives() -> None:
    with pytest.raises(SplitserveError) as caught:
        Peers().fetch()
    assert caught.value.reason == "NO_WEIGHTS"


class Reader(WeightsReader):
    fingerprint, specs = "f" * 64, SPECS

    def read(self, spec: TensorSpec, start: int, count: int) -> memoryview:
        return memoryview(bytes(spec.num_bytes))[start : start + count]

    def rest(self) -> None:
        pass


class Host:
    """A worker that gives."""

    def __init__(self, rate: float | None = 1.0, weights: WeightsReader | None = None) -> None:
        self.config = WorkerConfig(worker_id="w", model="m", give_weights_gb_per_s=rate, transport="memory")
        self.parts: Any = SimpleNamespace(weights=weights)
        self.refusal: SplitserveError | None = None

    def require_accepting(self) -> None:
        if self.refusal is not None:
            raise self.refusal


class Rig:
    """A service, and a taker's window."""

    def __init__(self, host: Host | None = None) -> None:
        self.hub = MemoryHub()
        self.owner = MemoryTransport(self.hub)
        self.memory = PieceWindow(2, 4096)
        self.window = self.owner.register_memory(self.memory.memory).to_proto()
        self.host = host or Host(weights=Reader())
        self.service = WeightsService(self.host, lambda _kind: MemoryTransport(self.hub))
        self.sent: asyncio.Queue[weights_pb2.PullWeightsRequest | None] = asyncio.Queue()

    def send(self, *blocks: int, window: bool = False) -> None:
        message = weights_pb2.PullWeightsRequest(window=self.window if window else None, blocks=blocks)
        self.sent.put_nowait(message)

    def pull(self) -> AsyncIterator[weights_pb2.PullWeightsResponse]:
        async def requests() -> AsyncIterator[weights_pb2.PullWeightsRequest]:
            while (message := await self.sent.get()) is not None:
                yield message

        context: Any = None
        return self.service.PullWeights(requests(), context)

    async def refused(self, reason: str) -> None:
        with pytest.raises(SplitserveError) as caught:
            async for _ in self.pull():
                pass
        assert caught.value.reason == reason, caught.value.message
        assert not self.service.busy


async def test_one_pull() -> None:
    rig = Rig()
    rig.send(window=True)
    rig.send(0, 1)
    rig.send(0)
    rig.sent.put_nowait(None)
    (only,) = [answer async for answer in rig.pull()]
    assert [tensor.name for tensor in only.manifest.tensors] == ["one"]
    assert len(rig.owner.poll().notifications) == 3
    assert not rig.service.busy
    values = {sample.name: sample.value for metric in rig.service.metrics() for sample in metric.samples}
    assert values["splitserve_weights_given_bytes_total"] == 12000


async def test_one_pull_at_a_time() -> None:
    rig = Rig()
    rig.send(window=True)
    first = rig.pull()
    await anext(first)
    assert rig.service.busy
    with pytest.raises(ResourceExhaustedError) as caught:
        await anext(rig.pull())
    assert caught.value.reason == "WEIGHTS_BUSY"
    rig.sent.put_nowait(None)
    assert [answer async for answer in first] == []
    assert not rig.service.busy


@pytest.mark.parametrize(
    ("host", "reason"),
    [(Host(None, Reader()), "NO_WEIGHTS"), (Host(1.0, None), "NO_WEIGHTS")],
    ids=["it is not to", "it has none"],
)
async def test_a_worker_that_gives_none(host: Host, reason: str) -> None:
    await Rig(host).refused(reason)


async def test_a_worker_that_sleeps_gives_none() -> None:
    host = Host(weights=Reader())
    host.refusal = UnavailableError("it sleeps", reason="SLEEPING")
    await Rig(host).refused("SLEEPING")


Spoil = Callable[[Rig], None]


def _no_window(rig: Rig) -> None:
    rig.send(0)


def _two_windows(rig: Rig) -> None:
    rig.send(window=True)
    rig.send(window=True)


def _many_blocks(rig: Rig) -> None:
    rig.send(window=True)
    rig.send(*[0] * 65)


def _no_block(rig: Rig) -> None:
    rig.send(window=True)
    rig.send(2)


def _wide_window(rig: Rig) -> None:
    rig.window.layout.head_dim = 2**31
    rig.send(window=True)


def _empty_grant(rig: Rig) -> None:
    rig.send(window=True)
    rig.send()


def _nothing(rig: Rig) -> None:
    rig.sent.put_nowait(None)


@pytest.mark.parametrize(
    "spoil", [_no_window, _two_windows, _many_blocks, _no_block, _wide_window, _empty_grant, _nothing]
)
async def test_wrong_messages_are_refused(spoil: Spoil) -> None:
    rig = Rig()
    spoil(rig)
    await rig.refused("INVALID_ARGUMENT")


async def test_a_taker_that_grants_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRANT_S", 0.01)
    rig = Rig()
    rig.send(window=True)
    await rig.refused("WEIGHTS_STALLED")


async def test_a_pull_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PULL_S", 0.01)
    rig = Rig()
    rig.send(window=True)
    await rig.refused("WEIGHTS_STALLED")


async def test_a_slow_pull_goes_on_while_pieces_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, skipped_s = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + skipped_s)
    rig = Rig(Host(rate=10_000.0, weights=Reader()))
    rig.send(window=True)
    pull = rig.pull()
    await anext(pull)
    rest = asyncio.create_task(anext(pull, None))
    for given in (4096, 8192, 12000):
        skipped_s += 0.9 * module.GRANT_S
        rig.send(0)
        while rig.service._given_bytes < given:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    skipped_s += 0.9 * module.GRANT_S
    rig.sent.put_nowait(None)
    assert await rest is None
    assert not rig.service.busy


class SlowTransport(MemoryTransport):
    """One that connects once `may_connect` is set."""

    def __init__(self, hub: MemoryHub) -> None:
        super().__init__(hub)
        self.connects, self.may_connect, self.closed = (threading.Event() for _ in range(3))

    def connect(self, peer: TransferEndpoint) -> None:
        self.connects.set()
        assert self.may_connect.wait(PATIENCE_S)
        super().connect(peer)

    def close(self) -> None:
        super().close()
        self.closed.set()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rig, SlowTransport]]:
    """A giver that hangs while it connects, and waits for nobody."""
    monkeypatch.setattr(module, "WRITE_S", 0.0)
    rig = Rig()
    transport = SlowTransport(rig.hub)
    rig.service = WeightsService(rig.host, lambda _kind: transport)
    rig.send(window=True)
    yield rig, transport
    transport.may_connect.set()


async def _closes(transport: SlowTransport) -> None:
    assert not transport.closed.is_set()
    transport.may_connect.set()
    assert await asyncio.to_thread(transport.closed.wait, PATIENCE_S)


async def test_a_taker_that_cannot_be_reached_frees_the_giver(
    slow: tuple[Rig, SlowTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OPEN_S", 0.01)
    await slow[0].refused("WEIGHTS_STALLED")
    await _closes(slow[1])


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_taker_that_leaves_while_the_giver_connects(
    slow: tuple[Rig, SlowTransport], cancels: int
) -> None:
    rig, transport = slow
    call = asyncio.create_task(rig.refused("never"))
    assert await asyncio.to_thread(transport.connects.wait, PATIENCE_S)
    for _ in range(cancels):
        call.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()
    assert not rig.service.busy
    await _closes(transport)


async def test_a_taker_that_leaves_frees_the_giver() -> None:
    rig = Rig()
    rig.send(window=True)
    rig.send(0)

    begun = asyncio.Event()

    async def read() -> None:
        async for _ in rig.pull():
            begun.set()

    call = asyncio.create_task(read())
    await begun.wait()
    assert rig.service.busy
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert not rig.service.busy
