"""One pull of weights between a giver and a taker in one process, and its faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from kv_transfer.transports.transport import TransferEndpoint
from kv_transfer.weights import window as windows
from kv_transfer.weights.giver import WeightsGiver
from kv_transfer.weights.manifest import Manifest, TensorSpec, WeightsReader
from kv_transfer.weights.taker import Destination, WeightsTaker
from kv_transfer.weights.window import PieceWindow
from kv_transfer.weights.written import WrittenPiece
from splitserve.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    SplitserveError,
    TransferError,
    UnavailableError,
)

PIECE = 4096
SPECS = (
    TensorSpec("embed", (100, 33), "float32"),
    TensorSpec("norm", (7,), "bfloat16"),
    TensorSpec("none", (0, 4), "float32"),
    TensorSpec("scale", (), "float32"),
    TensorSpec("exact", (1024,), "float32"),
)


class Weights(WeightsReader):
    """Random bytes; `lies` gives other bytes than it has."""

    fingerprint = "f" * 64
    specs = SPECS

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.rests = 0
        self.content = {spec.name: rng.bytes(spec.num_bytes) for spec in SPECS}

    def read(self, spec: TensorSpec, start: int, count: int) -> memoryview:
        return memoryview(self.content[spec.name])[start : start + count]

    def rest(self) -> None:
        self.rests += 1


class LocalCall:
    """A call to a giver in this process. `spoil` is called with the number of each piece before it is written."""

    def __init__(
        self, hub: MemoryHub, reader: WeightsReader, spoil: Callable[[int], None] = lambda _: None
    ) -> None:
        self.hub, self.reader, self.spoil = hub, reader, spoil
        self.giver: WeightsGiver | None = None
        self.error: SplitserveError | None = None
        self.window: TransferEndpoint | None = None
        self.manifest: Manifest | None = None
        self.pieces = 0
        self.finished = self.granted = False

    def open(self, window: TransferEndpoint) -> Manifest:
        self.window = window
        self.giver = WeightsGiver(self.reader, lambda: MemoryTransport(self.hub), window)
        manifest = self.giver.open()
        return self.manifest or manifest

    def grant(self, blocks: Sequence[int]) -> None:
        assert self.giver is not None
        self.granted = True
        for block in blocks:
            try:
                self.spoil(self.pieces)
                self.giver.write(block)
            except SplitserveError as error:
                self.error = error
                return
            self.pieces += 1

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        assert self.giver is not None
        self.giver.close()
        self.finished = True


class Taken:
    """What the taker keeps."""

    def __init__(self) -> None:
        self.tensors: dict[str, Destination] = {}

    def allocate(self, spec: TensorSpec) -> Destination:
        self.tensors[spec.name] = np.zeros(spec.num_bytes, np.uint8)
        return self.tensors[spec.name]


class Clock:
    """Seconds that pass only while somebody waits."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, _seconds: float) -> None:
        self.now_s += 1.0


def taker(call: LocalCall, blocks: int = 3) -> WeightsTaker:
    clock = Clock()
    return WeightsTaker(
        call,
        lambda: MemoryTransport(call.hub),
        piece_bytes=PIECE,
        window_blocks=blocks,
        clock=clock,
        wait=clock.wait,
    )


@pytest.fixture
def call() -> LocalCall:
    return LocalCall(MemoryHub(), Weights())


@pytest.mark.parametrize("blocks", [1, 2, 3, 64])
def test_all_bytes_arrive(call: LocalCall, blocks: int) -> None:
    taken, left = Taken(), len(windows._abandoned)
    assert taker(call, blocks).take(SPECS[::-1], taken.allocate).fingerprint == Weights.fingerprint
    assert {name: bytes(one) for name, one in taken.tensors.items()} == Weights().content
    assert call.finished
    assert isinstance(call.reader, Weights)
    assert call.reader.rests == 1
    assert len(windows._abandoned) == left


def refused(call: LocalCall, reason: str, specs: Sequence[TensorSpec] = SPECS) -> Taken:
    """What was allocated of a pull that fails with `reason`. Its window is never used again if a block was granted."""
    taken, left = Taken(), len(windows._abandoned)
    with pytest.raises(SplitserveError) as caught:
        taker(call).take(specs, taken.allocate)
    assert caught.value.reason == reason, caught.value.message
    assert len(windows._abandoned) == left + (1 if taken.tensors or call.granted else 0)
    return taken


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": (33, 100)}, "'embed' is float32 [100, 33] at the giver"),
        ({"dtype": "float16"}, "'embed' is float32"),
        ({"name": "other"}, "has a tensor 'embed'"),
    ],
)
def test_weights_of_another_model_are_refused_before_anything_is_allocated(
    call: LocalCall, changes: dict[str, object], says: str
) -> None:
    specs = [dataclasses.replace(SPECS[0], **changes), *SPECS[1:]]  # type: ignore[arg-type]
    taken = Taken()
    with pytest.raises(SplitserveError, match=r".*") as caught:
        taker(call).take(specs, taken.allocate)
    assert caught.value.reason == "WEIGHTS_MISMATCH"
    assert says in caught.value.message
    assert not taken.tensors


def test_a_tensor_too_few_or_twice_is_refused(call: LocalCall) -> None:
    more = [*SPECS, TensorSpec("bias", (3,), "float32")]
    assert not refused(call, "WEIGHTS_MISMATCH", more).tensors
    again = LocalCall(MemoryHub(), Weights())
    again.manifest = Manifest("f" * 64, "agent", (*SPECS, SPECS[0]))
    assert not refused(again, "WEIGHTS_MISMATCH").tensors


def test_a_refused_call_costs_no_window(call: LocalCall, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(window: TransferEndpoint) -> Manifest:
        raise ResourceExhaustedError("busy", reason="WEIGHTS_BUSY")

    monkeypatch.setattr(call, "open", busy)
    refused(call, "WEIGHTS_BUSY")
    assert not call.granted


@pytest.mark.parametrize("granted", [False, True])
def test_a_transport_that_does_not_close_costs_the_window(
    call: LocalCall, granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(_self: MemoryTransport) -> None:
        raise TransferError("it does not close", reason="NOT_CLOSED")

    monkeypatch.setattr(MemoryTransport, "close", close)
    left = len(windows._abandoned)
    with pytest.raises(TransferError) as caught:
        taker(call).take(SPECS if granted else SPECS[1:], Taken().allocate)
    assert caught.value.reason == "NOT_CLOSED"
    assert call.granted == granted
    assert len(windows._abandoned) == left + 1


def test_an_abandoned_window_keeps_its_addresses_and_no_memory() -> None:
    window = PieceWindow(3, PIECE)
    for index in range(3):
        window.block(index)[:] = 7
    window.abandon()
    assert window in windows._abandoned
    assert not any(window.block(index).any() for index in range(3)), "fresh pages have zeros"


def test_bytes_that_change_on_their_way_are_noticed(call: LocalCall) -> None:
    def spoil(number: int) -> None:
        if number == 2:
            assert call.giver is not None
            own = call.giver._window.block(0)
            write = call.giver._transport.write

            def flipped(*of: object) -> int:
                own[5] ^= 1
                return write(*of)  # type: ignore[arg-type]

            call.giver._transport.write = flipped  # type: ignore[assignment, method-assign]

    call.spoil = spoil
    refused(call, "WEIGHTS_CHECKSUM")


def test_a_giver_that_dies_in_the_middle(call: LocalCall) -> None:
    def die(number: int) -> None:
        if number == 3:
            raise UnavailableError("the giver is gone")

    call.spoil = die
    refused(call, "UNAVAILABLE")


def test_a_giver_that_falls_silent(call: LocalCall) -> None:
    grant, grants = call.grant, [0]

    def one(blocks: Sequence[int]) -> None:
        grants[0] += 1
        if grants[0] == 1:
            grant(blocks)

    call.grant = one  # type: ignore[method-assign]
    refused(call, "WEIGHTS_STALLED")


@pytest.mark.parametrize("changes", [{"number": 7}, {"block": 2}, {"count": 12}])
def test_another_piece_than_is_due_is_refused(
    call: LocalCall, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = WrittenPiece.pack
    monkeypatch.setattr(WrittenPiece, "pack", lambda self: pack(dataclasses.replace(self, **changes)))
    refused(call, "WEIGHTS_MALFORMED")


def test_a_notification_that_is_none(call: LocalCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WrittenPiece, "pack", lambda self: b"WGT1")
    refused(call, "WEIGHTS_MALFORMED")


def test_what_others_send_is_ignored(call: LocalCall) -> None:
    open_, others = call.open, list[MemoryTransport]()

    def with_stranger(window: TransferEndpoint) -> Manifest:
        stranger = MemoryTransport(call.hub)
        stranger.register_memory(PieceWindow(1, PIECE).memory)
        stranger.connect(window)
        stranger.notify(window.agent_id, WrittenPiece(0, 0, 1, 1).pack())
        others.append(stranger)
        return open_(window)

    call.open = with_stranger  # type: ignore[method-assign]
    taken = Taken()
    taker(call).take(SPECS, taken.allocate)
    assert {name: bytes(one) for name, one in taken.tensors.items()} == Weights().content


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("window.memory_kind", {"memory_kind": "VRAM"}),
        ("window.num_blocks", {"num_blocks": 65}),
        ("window.layout", {"layer_stride": 8}),
    ],
)
def test_a_window_out_of_bounds_is_refused(field: str, changes: dict[str, object]) -> None:
    memory = dataclasses.replace(PieceWindow(2, PIECE).memory, **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError) as caught:
        WeightsGiver(
            Weights(), lambda: MemoryTransport(MemoryHub()), TransferEndpoint("a", "memory", b"", memory)
        )
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("window.layout.head_dim", {"head_dim": 2**31}),
        ("window.layout", {"num_layers": 1024, "num_kv_heads": 1024}),
        ("window.layout", {"axis_order": "layer,kv,head,token,dim"}),
    ],
)
def test_memory_of_another_layout_is_no_window(field: str, changes: dict[str, object]) -> None:
    memory = PieceWindow(2, PIECE).memory
    memory = dataclasses.replace(memory, layout=dataclasses.replace(memory.layout, **changes))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError) as caught:
        WeightsGiver(
            Weights(), lambda: MemoryTransport(MemoryHub()), TransferEndpoint("a", "memory", b"", memory)
        )
    assert caught.value.field == field


def test_blocks_outside_the_window_and_beyond_the_end_are_refused(call: LocalCall) -> None:
    window = PieceWindow(2, PIECE)
    owner = MemoryTransport(call.hub)
    call.open(owner.register_memory(window.memory))
    giver = call.giver
    assert giver is not None
    for block in (-1, 2, 2**31):
        with pytest.raises(InvalidArgumentError):
            giver.write(block)
    for _ in range(7):
        giver.write(1)
    with pytest.raises(SplitserveError) as caught:
        giver.write(0)
    assert caught.value.reason == "NO_MORE_WEIGHTS"
    giver.close()
