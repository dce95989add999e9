"""Each planned fault does exactly what its description says, when it is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from pydantic import ValidationError

from bench.faults.plan import FaultPlan, Trigger
from bench.faults.transport import FaultyTransport
from kv_transfer.transports.transport import WriteResult
from splitserve.errors import TransferError
from tests.support.transfer.memory_transport import MemoryHub, MemoryTransport
from tests.support.transfer.numpy_pool import LAYOUT, NumpyPool

BLOCKS = 8
ALWAYS = Trigger(every=1)


@dataclass
class Pair:
    """A writer with faults, an owner, and a fake clock."""

    plan: FaultPlan
    owner_plan: FaultPlan = field(default_factory=FaultPlan)
    now: float = 100.0
    writes: list[WriteResult] = field(default_factory=list)
    heard: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        hub = MemoryHub()
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        self.transport = FaultyTransport(MemoryTransport(hub), self.plan, clock)
        self.owner = FaultyTransport(MemoryTransport(hub), self.owner_plan, clock)
        self.source, self.target = NumpyPool(BLOCKS), NumpyPool(BLOCKS, fill=0xEE)
        self.source.stamp(5)
        self.transport.register_memory(self.source.memory)
        self.endpoint = self.owner.register_memory(self.target.memory)
        self.peer = self.endpoint.agent_id
        self.transport.connect(self.endpoint)

    def write(self, block: int, notification: bytes | None = None) -> int:
        return self.transport.write(self.peer, [block], [block], notification)

    def poll(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.writes += self.transport.poll().writes
        self.heard += [message for _, message in self.owner.poll().notifications]

    def landed(self, block: int) -> bool:
        return bool((self.target.data[block] == self.source.data[block]).all())


def test_latency_holds_everything_back() -> None:
    pair = Pair(FaultPlan(latency_s=0.5))
    handle = pair.write(1, b"w")
    pair.transport.notify(pair.peer, b"n")
    pair.poll(0.49)
    assert (pair.writes, pair.heard, pair.landed(1)) == ([], [], False)
    assert pair.transport.needs_poll
    pair.poll(0.02)
    assert pair.writes == [WriteResult(handle)]
    assert sorted(pair.heard) == [b"n", b"w"]
    assert pair.landed(1)
    assert not pair.transport.needs_poll


def test_bandwidth_lets_one_write_after_the_other_pass() -> None:
    pair = Pair(FaultPlan(bandwidth_bytes_per_s=LAYOUT.block_bytes))
    for block in range(3):
        pair.write(block)
    for passed in range(1, 4):
        pair.poll(1.0)
        assert [pair.landed(block) for block in range(3)] == [block < passed for block in range(3)]


@pytest.mark.parametrize("riding", [True, False])
def test_notifications_dropped_doubled_and_late(riding: bool) -> None:
    plan = FaultPlan(
        drop_notification=Trigger(at=(1,)),
        duplicate_notification=Trigger(at=(2,)),
        delay_notification=Trigger(at=(3,)),
        reorder_notification=Trigger(at=(5,)),
        hold_s=10.0,
    )
    pair = Pair(plan)
    for number in range(1, 8):
        message = b"%d" % number
        if riding:
            pair.write(number % BLOCKS, message)
        else:
            pair.transport.notify(pair.peer, message)
        pair.poll()
    assert pair.heard == [b"2", b"2", b"4", b"6", b"5", b"7"]
    pair.poll(10.0)
    assert pair.heard[-1] == b"3"
    assert all(pair.landed(number) for number in range(1, 8)) == riding
    assert all(write.error is None for write in pair.writes)
    assert dict(pair.transport.dice.injected) == {
        "drop_notification": 1,
        "duplicate_notification": 1,
        "delay_notification": 1,
        "reorder_notification": 1,
    }


def test_a_reordered_notification_without_a_next_one_is_late() -> None:
    pair = Pair(FaultPlan(reorder_notification=ALWAYS, hold_s=2.0))
    pair.transport.notify(pair.peer, b"alone")
    pair.poll(1.9)
    assert pair.heard == []
    pair.poll(0.2)
    assert pair.heard == [b"alone"]


def test_arrivals_dropped_doubled_and_late() -> None:
    owner = FaultPlan(
        drop_arrival=Trigger(at=(1,)),
        duplicate_arrival=Trigger(at=(1,)),
        delay_arrival=Trigger(at=(2,)),
        hold_s=3.0,
    )
    pair = Pair(FaultPlan(), owner)
    for message in (b"1", b"2", b"3", b"4"):
        pair.transport.notify(pair.peer, message)
    pair.poll()
    assert pair.heard == [b"2", b"2", b"4"]
    pair.poll(3.0)
    assert pair.heard[3:] == [b"3"]


@pytest.mark.parametrize(("fault", "lands"), [("stall_write", False), ("unreported_write", True)])
def test_a_write_that_never_ends_is_failed_by_disconnect(fault: str, lands: bool) -> None:
    pair = Pair(FaultPlan.model_validate({fault: {"at": [1]}}))
    stuck, fine = pair.write(1, b"stuck"), pair.write(2)
    for _ in range(5):
        pair.poll(100.0)
    assert pair.writes == [WriteResult(fine)]
    assert pair.landed(1) == lands
    assert pair.heard == ([b"stuck"] if lands else [])
    pair.transport.disconnect(pair.peer)
    pair.poll()
    assert [write.handle for write in pair.writes] == [fine, stuck]
    assert pair.writes[1].error


def test_a_write_that_never_ends_is_failed_by_a_broken_connection() -> None:
    pair = Pair(FaultPlan(stall_write=Trigger(at=(1,))))
    stuck = pair.write(1)
    pair.owner.close()
    pair.write(2)
    pair.poll()
    assert {write.handle for write in pair.writes if write.error} == {stuck, stuck + 1}


def test_a_late_write_lands_and_ends_late() -> None:
    pair = Pair(FaultPlan(late_write=Trigger(at=(1,)), hold_s=5.0))
    late, fine = pair.write(1, b"late"), pair.write(2, b"fine")
    pair.poll(4.9)
    assert (pair.writes, pair.heard, pair.landed(1)) == ([WriteResult(fine)], [b"fine"], False)
    pair.poll(0.2)
    assert (pair.writes[1:], pair.heard[1:], pair.landed(1)) == ([WriteResult(late)], [b"late"], True)


@pytest.mark.parametrize("disconnected", [False, True])
def test_an_unclean_write_fails_at_once_and_lands_late(disconnected: bool) -> None:
    pair = Pair(FaultPlan(unclean_write=Trigger(at=(1,)), hold_s=2.0))
    handle = pair.write(1, b"done")
    pair.poll()
    assert [(write.handle, write.in_doubt) for write in pair.writes] == [(handle, True)]
    if disconnected:
        pair.transport.disconnect(pair.peer)
    pair.poll(3.0)
    pair.poll()
    assert pair.landed(1) is not disconnected
    assert len(pair.writes) == 1
    assert pair.heard == []


def test_wrong_bytes_leave_the_source_alone() -> None:
    pair = Pair(FaultPlan(wrong_bytes=Trigger(at=(1, 2))))
    before = pair.source.data.copy()
    pair.write(BLOCKS - 1, b"one")
    pair.transport.write(pair.peer, [1, 2, 3], [1, 2, 3])
    pair.write(4)
    pair.poll()
    np.testing.assert_array_equal(pair.source.data, before)
    assert [pair.landed(block) for block in (BLOCKS - 1, 1, 2, 3, 4)] == [False] * 4 + [True]
    assert pair.heard == [b"one"]


def test_a_broken_connection_ends_its_writes_and_can_be_made_again() -> None:
    pair = Pair(FaultPlan(break_connection=Trigger(at=(3,)), stall_write=Trigger(at=(1,))))
    handles = [pair.write(block) for block in range(3)]
    assert pair.transport.connected() == frozenset()
    pair.poll()
    assert sorted(write.handle for write in pair.writes) == handles
    assert all(write.error for write in pair.writes)
    with pytest.raises(TransferError):
        pair.write(4)
    pair.transport.connect(pair.endpoint)
    pair.write(5)
    pair.poll()
    assert pair.landed(5)


def test_equal_seeds_give_equal_faults() -> None:
    def run(seed: int) -> tuple[list[bytes], dict[str, int]]:
        chance = Trigger(probability=0.3)
        plan = FaultPlan(seed=seed, drop_notification=chance, duplicate_notification=chance)
        pair = Pair(plan)
        for number in range(60):
            pair.transport.notify(pair.peer, b"%d" % number)
        pair.poll()
        return pair.heard, dict(pair.transport.dice.injected)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert 5 < run(1)[1]["drop_notification"] < 40


def test_one_fault_does_not_shift_another() -> None:
    chance = Trigger(probability=0.5)

    def dropped(plan: FaultPlan) -> set[bytes]:
        pair = Pair(plan)
        sent = [b"%d" % number for number in range(40)]
        for message in sent:
            pair.transport.notify(pair.peer, message)
        pair.poll()
        return set(sent) - set(pair.heard)

    alone = dropped(FaultPlan(drop_notification=chance))
    assert alone == dropped(FaultPlan(drop_notification=chance, duplicate_notification=chance))


def test_close_forgets_what_is_held() -> None:
    pair = Pair(FaultPlan(latency_s=1.0))
    pair.write(1, b"x")
    pair.transport.close()
    pair.transport.close()
    pair.poll(2.0)
    assert (pair.writes, pair.heard) == ([], [])


@pytest.mark.parametrize(
    "bad", [{"drop": {}}, {"latency_s": -1}, {"late_write": {"at": [0]}}, {"late_write": {"probability": 2}}]
)
def test_plans_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        FaultPlan.model_validate(bad)
