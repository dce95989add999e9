"""A preempted sequence is read back where tiers have its KV, as a prompt is, and computed where that is sooner."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core.types import FinishReason
from engine.pacing.step_time_fit import PromptFit
from engine.runner.simulated_runner import expected_tokens
from tests.support.engine.engine_rig import BLOCK, request
from tests.support.tiers.tiers_rig import FailingStore, TieredRig

POOL, LENGTH, ANSWER = 24, 30, 40
BLOCK_BYTES = BLOCK * 16
NAMES = "abc"
"""Requests whose prompts fit the pool together, and whose answers do not."""


def prompt(name: str) -> list[int]:
    return random.Random(name).choices(range(32, 127), k=LENGTH)


class PreemptingRig(TieredRig):
    """Counts the tokens that are computed."""

    computed = 0

    def step(self) -> None:
        self.core.begin_step()
        begun = self.core._step
        assert begun is not None
        self.computed += begun.result.scheduled_tokens
        self.deliver()
        self.core.finish_step()
        while self.below.copying_blocks:
            assert self.woken.wait(10)
            self.woken.clear()
            self.below.collect()
        self.deliver()

    @property
    def again(self) -> int:
        """Tokens that were computed more than once."""
        return self.computed - len(self.outputs) * (LENGTH + ANSWER - 1)


@pytest.fixture
def rigs() -> Iterator[list[PreemptingRig]]:
    made: list[PreemptingRig] = []
    yield made
    for rig in made:
        rig.core.close()


def rig_of(
    rigs: list[PreemptingRig], host_blocks: int = 128, disk: Path | FailingStore | None = None
) -> PreemptingRig:
    rigs.append(PreemptingRig(host_blocks, disk, num_blocks=POOL))
    return rigs[-1]


def ask(rig: PreemptingRig, names: str = NAMES) -> None:
    for name in names:
        rig.core.add_request(request(name, prompt(name), max_tokens=ANSWER))


def assert_answered(rig: PreemptingRig, names: str = NAMES) -> None:
    """With every token, and nothing is left."""
    for name in names:
        assert rig.outputs[name].token_ids == expected_tokens(prompt(name), ANSWER)
    rig.assert_clean()


def test_it_is_read_back_from_host_memory(rigs: list[PreemptingRig]) -> None:
    rig = rig_of(rigs)
    ask(rig)
    rig.settle()
    assert_answered(rig)
    assert rig.hits()["host"] > LENGTH, "blocks of its answer among them"
    computing = computing_rig(rigs)
    ask(computing)
    computing.settle()
    assert_answered(computing)
    assert computing.hits() == {"host": 0}
    assert 0 < 2 * rig.again < computing.again


def computing_rig(rigs: list[PreemptingRig]) -> PreemptingRig:
    """Where computing is sooner than any read."""
    rig = rig_of(rigs)
    rig.below.host.rate.measured(1, 1e6)
    rig.below._prompt_fit = lambda: PromptFit(0.0, 1e-9, 0.0)
    return rig


def test_it_is_read_back_from_the_disk(rigs: list[PreemptingRig], tmp_path: Path) -> None:
    rig = rig_of(rigs, host_blocks=8, disk=tmp_path)
    ask(rig)
    rig.settle()
    assert_answered(rig)
    assert rig.hits()["disk"] > 0


def test_damaged_blocks_are_computed(rigs: list[PreemptingRig]) -> None:
    disk = FailingStore(64, BLOCK_BYTES)
    disk.flip = lambda slot: True
    rig = rig_of(rigs, host_blocks=8, disk=disk)
    ask(rig)
    rig.settle()
    assert_answered(rig)
    assert rig.hits()["disk"] == 0


def until_read(rig: PreemptingRig) -> str:
    """Runs until a preempted sequence waits for its read; its name."""
    for _ in range(500):
        rig.step()
        waiting = [name for name, each in rig.core._live.items() if not each.block_ids]
        if waiting and rig.below._reading:
            return waiting[0]
    raise AssertionError("nothing was read")


def slow_rig(rigs: list[PreemptingRig]) -> tuple[PreemptingRig, FailingStore]:
    disk = FailingStore(64, BLOCK_BYTES)
    disk.may_read.clear()
    return rig_of(rigs, host_blocks=8, disk=disk), disk


def test_the_others_go_on_while_it_is_read(rigs: list[PreemptingRig]) -> None:
    rig, disk = slow_rig(rigs)
    ask(rig)
    name = until_read(rig)
    waiting = [each for each in rig.core._live.values() if not each.block_ids]
    assert rig.core._live[name] in waiting
    load = rig.core.load()
    assert load.waiting_requests == len(waiting)
    assert load.waiting_tokens == sum(each.remaining for each in waiting)
    rig.run()
    assert rig.outputs[name].finish_reason is None
    assert any(rig.outputs[other].finish_reason for other in NAMES if other != name)
    disk.may_read.set()
    rig.settle()
    assert_answered(rig)


@pytest.mark.parametrize("ended", ["abort", "deadline"])
def test_one_that_ends_while_it_is_read_leaves_nothing(rigs: list[PreemptingRig], ended: str) -> None:
    rig, disk = slow_rig(rigs)
    for name in NAMES:
        deadline_s = rig.clock.now + (5 if ended == "deadline" else 1e9)
        rig.core.add_request(request(name, prompt(name), max_tokens=ANSWER, deadline_s=deadline_s))
    name = until_read(rig)
    if ended == "abort":
        assert rig.core.abort(name)
    else:
        rig.clock.now += 10
    rig.run()
    disk.may_read.set()
    rig.settle()
    assert rig.outputs[name].finish_reason is not FinishReason.LENGTH
    assert len(rig.outputs[name].token_ids) < ANSWER
    rig.assert_clean()


def test_nothing_is_read_without_a_preemption(rigs: list[PreemptingRig]) -> None:
    rig = rig_of(rigs)
    ask(rig, "a")
    rig.settle()
    assert_answered(rig, "a")
    assert rig.hits() == {"host": 0}
    assert rig.again == 0
