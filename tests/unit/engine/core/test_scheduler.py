"""Scheduling: chunks, fairness, bypass, preemption, priorities."""

from __future__ import annotations

import gc
import time

import pytest

from engine.core.engine import EngineRequest, StopParams
from engine.core.model_runner import SamplingParams
from engine.core.scheduler import KVCacheManager, Scheduler, SchedulerOutput
from engine.core.sequence import Sequence, SequenceStatus
from engine.kv_cache.block_pool import BlockPool
from engine.scheduling.waiting_queue import Precedence


class Bench:
    """A scheduler without a model: `step` pretends that the chosen tokens were computed."""

    def __init__(
        self, *, blocks: int = 1000, budget: int = 64, running: int = 64, bypasses: int = 16
    ) -> None:
        self.kv = KVCacheManager(BlockPool(blocks), 4, prefix_cache=False)
        self.scheduler = Scheduler(
            self.kv, max_step_tokens=budget, max_running=running, max_bypasses=bypasses
        )
        self.arrivals = 0

    def add(
        self,
        name: str,
        tokens: int,
        *,
        priority: int = 0,
        tenant: int = 0,
        rank: int = 0,
        prefill_only: bool = False,
    ) -> Sequence:
        request = EngineRequest(
            name,
            tuple([1] * tokens),
            SamplingParams(),
            StopParams(max_tokens=1000),
            precedence=Precedence(rank, tenant, priority),
            prefill_only=prefill_only,
        )
        sequence = Sequence(request, self.arrivals)
        self.arrivals += 1
        self.scheduler.enqueue(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        return self.compute(self.scheduler.schedule())

    def compute(self, step: SchedulerOutput) -> dict[str, int]:
        for sequence, tokens in step.num_new.items():
            assert tokens > 0
            sequence.num_computed += tokens
            assert len(sequence.block_ids) * 4 >= sequence.num_computed
            if sequence.remaining == 0:
                sequence.tokens.append(1)
        return {sequence.request_id: tokens for sequence, tokens in step.num_new.items()}

    def end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.kv.free(sequence)


def test_a_long_prompt_is_cut_and_decodes_continue() -> None:
    bench = Bench(budget=64)
    bench.add("a", 5)
    assert bench.step() == {"a": 5}
    bench.add("long", 150)
    for _ in range(4):
        assert bench.step() == {"a": 1, "long": 32}
    assert bench.step() == {"a": 1, "long": 22}
    assert bench.step() == {"a": 1, "long": 1}


def test_short_prompts_are_not_held_up_by_a_long_one() -> None:
    bench = Bench(budget=64, blocks=10000)
    bench.add("long", 5000)
    bench.step()
    bench.add("next", 5000)
    for name in ("s1", "s2"):
        bench.add(name, 8)
    step = bench.step()
    assert (step["s1"], step["s2"]) == (8, 8) or bench.step().keys() >= {"s1", "s2"}
    assert step["long"] >= 32
    assert sum(step.values()) == 64


def test_higher_priority_first_then_arrival() -> None:
    bench = Bench(running=1)
    order = [bench.add("late", 4), bench.add("high", 4, priority=5), bench.add("low", 4, priority=-1)]
    names: list[str] = []
    while len(names) < 3:
        (name,) = bench.step()
        names.append(name)
        bench.end(next(sequence for sequence in order if sequence.request_id == name))
    assert names == ["high", "late", "low"]


def test_a_misfit_is_bypassed_a_bounded_number_of_times() -> None:
    bench = Bench(blocks=20, bypasses=3)
    runner = bench.add("running", 16)
    bench.step()
    bench.add("misfit", 64)
    small = [bench.add(f"s{index}", 4) for index in range(6)]
    started: set[str] = set()
    for _ in range(6):
        started |= bench.step().keys()
    assert started == {"running", "s0", "s1", "s2"}
    assert not bench.scheduler.may_bypass(Precedence())
    assert not bench.scheduler.may_bypass(Precedence(tenant_key=7, within_tenant=100))
    assert bench.scheduler.may_bypass(Precedence(within_tenant=1))
    assert bench.scheduler.may_bypass(Precedence(class_rank=1, tenant_key=7, within_tenant=-100))
    for sequence in (runner, *small[:3]):
        bench.end(sequence)
    assert bench.step()["misfit"] > 0


def test_growth_preempts_the_lowest_priority_then_the_latest() -> None:
    bench = Bench(blocks=10)
    first = bench.add("first", 12)
    important = bench.add("important", 8, priority=3)
    last = bench.add("last", 8)
    bench.step()
    while last.status is SequenceStatus.RUNNING:
        bench.step()
    assert first.status is important.status is SequenceStatus.RUNNING
    assert (last.block_ids, last.num_computed) == ([], 0)
    assert len(last.tokens) > 8
    assert bench.scheduler.waiting_tokens == len(last.tokens)
    bench.end(important)
    bench.end(first)
    kept = len(last.tokens)
    assert bench.step() == {"last": kept}


def test_reservations_that_take_the_blocks_of_an_interrupted_answer_are_counted() -> None:
    bench = Bench(blocks=10, bypasses=2)
    bench.add("first", 12)
    last = bench.add("last", 12)
    bench.step()
    while last.status is SequenceStatus.RUNNING:
        bench.step()
    for _ in range(2):
        assert bench.scheduler.may_bypass(Precedence())
        bench.scheduler.count_bypass(Precedence())
    assert not bench.scheduler.may_bypass(Precedence())


def test_reservations_that_take_slots_before_a_waiting_prompt_are_counted() -> None:
    bench = Bench(running=1, bypasses=2)
    first, second = bench.add("first", 4), bench.add("second", 4)
    bench.step()
    bench.step()
    for _ in range(2):
        assert bench.scheduler.may_bypass(Precedence())
        bench.scheduler.count_bypass(Precedence())
    assert not bench.scheduler.may_bypass(Precedence())
    assert bench.scheduler.may_bypass(Precedence(class_rank=1)), "what comes before it"
    bench.end(first)
    assert bench.step() == {"second": 4}
    assert second.bypassed == 0
    assert bench.scheduler.may_bypass(Precedence())


def test_prefill_only_sequences_are_never_preempted() -> None:
    bench = Bench(blocks=7, budget=8)
    decode = bench.add("decode", 4)
    bench.step()
    held = bench.add("held", 15, prefill_only=True, priority=-9)
    while decode.status is SequenceStatus.RUNNING:
        step = bench.scheduler.schedule()
        for sequence, tokens in step.num_new.items():
            if sequence is decode:
                sequence.num_computed += tokens
                sequence.tokens.append(1)
    assert held.status is SequenceStatus.RUNNING
    assert len(held.block_ids) == 4


def test_more_decodes_than_budget_take_turns_and_leave_some_to_a_prompt() -> None:
    bench = Bench(budget=8)
    for index in range(12):
        bench.add(str(index), 1)
    counts: dict[str, int] = {}
    for _ in range(30):
        for name, tokens in bench.step().items():
            counts[name] = counts.get(name, 0) + tokens
    assert len(counts) == 12
    assert max(counts.values()) <= 2 * min(counts.values()) + 4
    bench.add("prompt", 20)
    steps = 0
    while bench.scheduler.waiting_tokens or any(s.remaining > 1 for s in bench.scheduler.running):
        bench.step()
        steps += 1
        assert steps < 40


def test_running_sequences_are_bounded_and_reservations_count() -> None:
    bench = Bench(running=3)
    for index in range(4):
        bench.add(str(index), 2)
    bench.scheduler.num_reserved = 1
    assert len(bench.step()) == 2
    bench.scheduler.num_reserved = 0
    assert len(bench.step()) == 3


def test_a_removed_sequence_is_not_scheduled() -> None:
    bench = Bench()
    gone = bench.add("gone", 5)
    bench.add("stays", 5)
    bench.scheduler.remove(gone)
    assert bench.scheduler.waiting_tokens == 5
    assert bench.step() == {"stays": 5}


def steps_per_second(waiting: int, *, blocked: bool) -> float:
    bench = Bench(blocks=500, running=9 if blocked else 8)
    for index in range(8):
        bench.add(str(index), 4)
    bench.step()
    for index in range(waiting):
        bench.add(f"w{index}", 1990 if blocked else 4)
    gc.collect()
    gc.disable()  # a collection walks all that waits and belongs to no step
    try:
        began = time.thread_time()  # not the time that other processes take
        for _ in range(100):
            bench.step()
        return 100 / (time.thread_time() - began)
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [False, True])
def test_ten_thousand_waiting_do_not_slow_a_step(blocked: bool) -> None:
    few = max(steps_per_second(10, blocked=blocked) for _ in range(3))
    many = max(steps_per_second(10_000, blocked=blocked) for _ in range(3))
    assert many > few / 3


def rounds(priorities: dict[str, int], *, blocks: int) -> list[dict[str, int]]:
    """What two tenants' requests of equal size get in each step, while blocks are short; by place, not by name."""
    bench = Bench(blocks=blocks, budget=16, running=3)
    for number in range(8):
        name = f"{'mine' if number % 3 else 'theirs'}-{number}"
        bench.add(name, 12, tenant=1 + bool(number % 3), priority=priorities.get(name, 0))
    given: list[dict[str, int]] = []
    for _ in range(40):
        step = bench.step()
        given.append({name: tokens for name, tokens in step.items() if name.startswith("theirs")})
    return given


def test_priorities_of_one_tenant_change_nothing_for_another() -> None:
    extremes = {"mine-1": -(2**31), "mine-2": 2**31 - 1, "mine-5": 100, "mine-7": 2**31 - 1}
    for blocks in (12, 14, 20):
        assert rounds(extremes, blocks=blocks) == rounds({}, blocks=blocks)


def test_growth_preempts_the_lowest_class_first() -> None:
    bench = Bench(blocks=10)
    low = bench.add("low", 12, rank=-1, tenant=1, priority=100)
    bench.add("high", 8, tenant=2, priority=-100)
    other = bench.add("other", 8, tenant=3)
    bench.step()
    while low.status is SequenceStatus.RUNNING:
        bench.step()
    assert other.status is SequenceStatus.RUNNING
