"""Weights through a window, over each transport: the giver on a thread of its own, as in a worker."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from kv_transfer.transports.factory import make_transport
from kv_transfer.transports.transport import TransferEndpoint
from kv_transfer.weights.giver import WeightsGiver
from kv_transfer.weights.manifest import Manifest, TensorSpec, WeightsReader
from kv_transfer.weights.taker import Destination, WeightsTaker
from splitserve.errors import SplitserveError, UnavailableError
from tests.support.transfer.ucx import require_ucx

SPECS = (TensorSpec("large", (1500, 1000), "float32"), TensorSpec("small", (5,), "bfloat16"))
pytestmark = pytest.mark.timeout(60)


class Reader(WeightsReader):
    fingerprint, specs = "f" * 64, SPECS

    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        self.content = {spec.name: rng.bytes(spec.num_bytes) for spec in SPECS}

    def read(self, spec: TensorSpec, start: int, count: int) -> memoryview:
        return memoryview(self.content[spec.name])[start : start + count]

    def rest(self) -> None:
        pass


class ThreadCall:
    """A call to a giver that runs on a thread, and ends after `pieces`."""

    def __init__(self, kind: str, pieces: float = float("inf")) -> None:
        self.kind, self.pieces = kind, pieces
        self.grants: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.opened: queue.SimpleQueue[Manifest] = queue.SimpleQueue()
        self.error: SplitserveError | None = None
        self.thread: threading.Thread | None = None

    def open(self, window: TransferEndpoint) -> Manifest:
        wire = TransferEndpoint.from_proto(window.to_proto())
        self.thread = threading.Thread(target=self._give, args=[wire])
        self.thread.start()
        return self.opened.get(timeout=20)

    def _give(self, window: TransferEndpoint) -> None:
        giver = WeightsGiver(Reader(), lambda: make_transport(self.kind), window)
        self.opened.put(giver.open())
        given = 0
        try:
            while (block := self.grants.get(timeout=20)) is not None:
                if given >= self.pieces:
                    raise UnavailableError("it is gone", reason="GONE")
                giver.write(block)
                given += 1
        except SplitserveError as error:
            self.error = error
        finally:
            giver.close()

    def grant(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.grants.put(block)

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        self.grants.put(None)
        assert self.thread is not None
        self.thread.join(20)
        self.check()


@pytest.fixture(params=["memory", "nixl", "ucx"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ucx":
        require_ucx()
    return str(request.param)


def pull(call: ThreadCall) -> dict[str, Destination]:
    taken: dict[str, Destination] = {}

    def allocate(spec: TensorSpec) -> Destination:
        taken[spec.name] = np.zeros(spec.num_bytes, np.uint8)
        return taken[spec.name]

    taker = WeightsTaker(call, lambda: make_transport(call.kind), piece_bytes=2**18, window_blocks=3)
    assert taker.take(SPECS, allocate).fingerprint == Reader.fingerprint
    return taken


def test_all_bytes_arrive(kind: str) -> None:
    for _ in range(2):  # a second pull is another pair of agents
        taken = pull(ThreadCall(kind))
        assert {name: bytes(content) for name, content in taken.items()} == Reader().content


def test_a_giver_that_goes_in_the_middle(kind: str) -> None:
    call = ThreadCall(kind, pieces=7)
    with pytest.raises(SplitserveError) as caught:
        pull(call)
    assert caught.value.reason == "GONE"
    assert call.thread is not None
    call.thread.join(20)
