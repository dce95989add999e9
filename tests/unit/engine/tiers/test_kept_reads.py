"""What is read for a preempted sequence is of use to it: its room is left to it, and nothing is read in circles."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from engine.core.precedence import Precedence
from engine.core.scheduler import SchedulerOutput
from engine.core.sequence import READS_A_PREEMPTION, Sequence
from engine.runner.simulated_runner import expected_tokens
from engine.tiers.tier_read import TierRead
from tests.support.engine.engine_rig import BLOCK, request
from tests.support.tiers.tiers_rig import FailingStore, TieredRig

POOL, LENGTH, ANSWER = 24, 30, 44
HALF = (POOL // 2 + 1) * BLOCK
"""Tokens of one that does not fit beside such a sequence."""
HIGH = Precedence(class_rank=1)


def prompt(name: str, length: int = LENGTH) -> list[int]:
    return random.Random(name).choices(range(32, 127), k=length)


class CountingRig(TieredRig):
    """Counts preemptions, the reads for preempted sequences, and the tokens that are computed."""

    def __init__(self, disk: FailingStore, num_blocks: int = POOL) -> None:
        super().__init__(64, disk, num_blocks=num_blocks)
        self.disk, self.only_disk = disk, False
        self.below._prompt_fit = lambda: None
        self.preempted = self.computed = self.steps = 0
        self.reads: list[TierRead] = []
        self._schedule = self.core._scheduler.schedule
        self.core._scheduler.schedule = self._counted  # type: ignore[method-assign]

    def _counted(self, now: float = 0.0) -> SchedulerOutput:
        step = self._schedule(now)
        self.preempted += step.preempted
        return step

    def step(self) -> None:
        self.core.begin_step()
        begun, self.steps = self.core._step, self.steps + 1
        assert begun is not None
        self.computed += begun.result.scheduled_tokens
        self.deliver()
        self.core.finish_step()
        while self.below.copying_blocks:
            if self.woken.wait(0.05):
                self.woken.clear()
                self.below.collect()
        self.deliver()
        self.reads += [read for read in self.below.under_way if read not in self.reads]
        if self.only_disk and self.preempted and not self.reads:
            self.drop_host()

    def drop_host(self) -> None:
        """Once what is on its way to the disk is there."""
        while len(self.below.all["disk"].thread):
            self.woken.wait(0.01)
        self.below.collect()
        for block_hash in list(self.below.host.index.hashes()):
            self.below.host.index.drop(block_hash)

    def ask(self, name: str, length: int = LENGTH, answer: int = ANSWER, **fields: object) -> None:
        self.core.add_request(request(name, prompt(name, length), max_tokens=answer, **fields))

    def until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(500):
            if is_so():
                return
            self.step()
        raise AssertionError("it does not come about")

    def assert_answered(self, name: str, length: int = LENGTH, answer: int = ANSWER) -> None:
        assert self.outputs[name].token_ids == expected_tokens(prompt(name, length), answer)


@pytest.fixture
def rig() -> Iterator[CountingRig]:
    rig = CountingRig(FailingStore(256, BLOCK * 16))
    yield rig
    rig.disk.may_read.set()
    rig.core.close()


def until_read(rig: CountingRig) -> str:
    """Runs until a preempted sequence waits for a read that does not end; its name."""
    rig.disk.may_read.clear()
    rig.only_disk = True
    for name in "ab":
        rig.ask(name)
    rig.until(lambda: bool(rig.below.under_way))
    (waiting,) = rig.core._kv.reading
    return waiting.request_id


def test_those_that_come_after_it_leave_it_its_room(rig: CountingRig) -> None:
    read = until_read(rig)
    rig.until(lambda: not rig.core.has_work())
    rig.ask("later", length=HALF, answer=3)
    rig.run()
    assert "later" not in rig.outputs, "the rest of the pool is not enough for both"
    computed = rig.computed
    rig.disk.may_read.set()
    rig.settle()
    for name in "ab":
        rig.assert_answered(name)
    rig.assert_answered("later", HALF, 3)
    again = rig.computed - computed - HALF - 2
    assert again < LENGTH, f"{read} is not computed again"
    rig.assert_clean()


def test_one_that_comes_before_it_does_not(rig: CountingRig) -> None:
    until_read(rig)
    rig.until(lambda: not rig.core.has_work())
    rig.ask("first", length=HALF, answer=3, precedence=HIGH)
    rig.run()
    rig.assert_answered("first", HALF, 3)
    rig.disk.may_read.set()
    rig.settle()
    for name in "ab":
        rig.assert_answered(name)
    rig.assert_clean()


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_what_was_left_to_one_that_ends_is_others(rig: CountingRig, how: str) -> None:
    read = until_read(rig)
    rig.until(lambda: not rig.core.has_work())
    rig.ask("later", length=HALF, answer=3)
    rig.run()
    if how == "abort":
        assert rig.core.abort(read)
        rig.disk.may_read.set()
    else:
        rig.alarms.advance(60)  # the disk is given up
        rig.below.collect()
    rig.settle(busy=lambda: "later" not in rig.outputs)
    rig.assert_answered("later", HALF, 3)
    rig.disk.may_read.set()
    rig.settle()
    if how == "deadline":
        rig.assert_answered(read)
    rig.assert_clean()
    assert not rig.core._kv._kept


def test_what_is_gone_before_it_has_started_is_read_once_more_and_then_computed(rig: CountingRig) -> None:
    """Streams of a higher class take all blocks, each time that it has been read."""
    read = until_read(rig)
    rig.until(lambda: not rig.core.has_work())
    before = len(rig.reads)
    for turn in range(4):
        rig.ask(f"first-{turn}", length=(POOL - 11) * BLOCK, answer=40, precedence=HIGH)
        rig.step()
        rig.disk.may_read.set()
        while rig.below.under_way:
            if rig.woken.wait(0.05):
                rig.woken.clear()
                rig.below.collect()
        rig.disk.may_read.clear()
        rig.until(lambda: bool(rig.below.under_way) or not rig.core.has_work())
        if rig.outputs[read].finish_reason:
            break
    assert len(rig.reads) - before == READS_A_PREEMPTION - 1, "the first one had begun"
    rig.disk.may_read.set()
    rig.settle()
    for name in "ab":
        rig.assert_answered(name)
    rig.assert_clean()


def test_its_room_is_left_to_it_where_it_reads_on_after_a_read_of_others(rig: CountingRig) -> None:
    """It begins as the prompt of another one, which is being read for that."""
    kv, tokens = rig.core._kv, prompt("long", 13 * BLOCK)
    rig.core.add_request(request("long", tokens, max_tokens=2))
    rig.settle()
    rig.drop_host()
    rig.core.add_request(request("others", prompt("others", (POOL - 1) * BLOCK), max_tokens=2))
    rig.settle()
    short = Sequence(request("short", tokens[: 5 * BLOCK], max_tokens=2), 100)
    long = Sequence(request("long", tokens, max_tokens=2), 101)
    long.reads_left = READS_A_PREEMPTION
    came: list[Sequence] = []
    rig.disk.may_read.clear()
    assert kv.reads(short, came.append)
    (first,) = rig.below.under_way
    rest = iter([False] * (len(first.hashes) - 1))

    def holds_the_next_ones(slot: int) -> bool:
        if next(rest, True):
            rig.disk.may_read.clear()
        return False

    rig.disk.flip = holds_the_next_ones
    assert kv.reads_again(long, 0, came.append)
    assert list(rig.below.under_way) == [first], "it waits for that one"
    rig.disk.may_read.set()
    rig.settle(busy=lambda: not came)
    assert came == [short]
    (second,) = rig.below.under_way
    assert second.waiting[0].owner is long
    lacking = len(tokens) // BLOCK - second.owned
    assert lacking > 0, "the last block is computed"
    assert kv._kept == {long: lacking}
    later = Sequence(request("later", prompt("later", rig.core.pool.free * BLOCK), max_tokens=2), 102)
    assert kv.start(later, watermark=0) is None, "it leaves the other one its room"
    rig.disk.flip = lambda slot: False
    rig.disk.may_read.set()
    rig.settle(busy=lambda: long not in came)
    assert kv.start(long, watermark=0) is not None
    assert not kv._kept
    assert kv.start(later, watermark=0) is None, "there are not so many now"
    kv.free(long)
    assert kv.start(later, watermark=0) is not None
    kv.free(later)
    rig.settle()
    rig.assert_clean()


@pytest.mark.parametrize("seed", range(6))
def test_a_pool_that_is_far_too_small_reads_a_bounded_number_of_times(seed: int) -> None:
    pick = random.Random(seed)
    rig = CountingRig(FailingStore(256, BLOCK * 16), num_blocks=20)
    sizes = {f"{seed}-{number}": (pick.randrange(8, 40), pick.randrange(10, 36)) for number in range(8)}
    for name, (length, answer) in sizes.items():
        rig.ask(name, length, answer, precedence=Precedence(class_rank=pick.randrange(2)))
    rig.settle()
    for name, (length, answer) in sizes.items():
        rig.assert_answered(name, length, answer)
    assert rig.preempted > 0
    assert len(rig.reads) <= READS_A_PREEMPTION * rig.preempted
    assert rig.steps < 8 * 40 + 50 * rig.preempted
    rig.assert_clean()
    assert not rig.core._kv._kept
    rig.core.close()
