"""Prompts beside streams with targets, and prompts with targets: paced and ordered, with the same tokens as ever.

Time is the rig's: a step takes what the runner says it does.
"""

from __future__ import annotations

import math
import random
from collections import abc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine.core.model_runner import SampledToken, ScheduledSequence
from engine.core.scheduler import MIN_PROMPT_TOKENS
from engine.core.sequence import Sequence, SequenceStatus
from engine.scheduling.waiting_queue import Precedence
from tests.support.engine.engine_rig import Clock, Rig, Script, hand_over, request
from tests.support.engine.simulated_tokens import expected_tokens

STEP_S, SEQUENCE_S, TOKEN_S = 0.02, 1e-3, 1.2e-3
TPOT_S = 0.05


class Timed(Script):
    """Advances the clock by what a step takes, and keeps who computed how many tokens."""

    clock = Clock()

    def execute(self, batch: abc.Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        decodes = [each for each in batch if each.num_new == 1]
        tokens = sum(each.num_new for each in batch) - len(decodes)
        taken_s = (STEP_S + SEQUENCE_S * len(decodes) if decodes else 0.0) + TOKEN_S * tokens
        self.clock.now += taken_s
        self.steps.append((self.clock.now, {each.request_id: each.num_new for each in batch}))
        return super().execute(batch)

    steps: list[tuple[float, dict[str, int]]]


def timed(**overrides: int | bool) -> Rig:
    values = {"num_blocks": 2000, "max_step_tokens": 512, "prefix_cache": False, **overrides}
    rig = Rig(kind=Timed, **values)
    assert isinstance(rig.runner, Timed)
    rig.runner.clock, rig.runner.steps = rig.clock, []
    return rig


def measured(**overrides: int | bool) -> Rig:
    """A rig whose engine has measured prompts and decode steps."""
    rig = timed(**overrides)
    for index, tokens in enumerate((100, 100, 200, 200, 100, 200, 30, 30)):
        rig.core.add_request(request(f"warm-{index}", prompt(index, tokens), max_tokens=5))
        rig.run()
    for index in range(2):
        rig.core.add_request(request(f"both-{index}", prompt(index, 20), max_tokens=40))
    rig.run()
    steps(rig).clear()
    return rig


def steps(rig: Rig) -> list[tuple[float, dict[str, int]]]:
    assert isinstance(rig.runner, Timed)
    return rig.runner.steps


def prompt(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed).randrange(97, 122) for _ in range(tokens)]


def stream(rig: Rig, name: str, seed: int, tpot_s: float | None = TPOT_S) -> None:
    """Adds a stream and runs the engine until it has its first token."""
    rig.core.add_request(request(name, prompt(seed, 20), max_tokens=200, tpot_s=tpot_s))
    while name not in rig.outputs:
        rig.step()


def token_times(rig: Rig, name: str) -> list[float]:
    """When each token of a stream came, from the first step in `steps` on in which it decodes."""
    return [now for now, work in steps(rig) if work.get(name) == 1]


def assert_in_time(times: list[float], first_s: float) -> None:
    assert len(times) > 10
    assert max(after - before for before, after in pairwise([first_s, *times])) <= TPOT_S + 1e-6


def test_a_long_prompt_comes_in_without_making_streams_late() -> None:
    rig = measured()
    stream(rig, "a", 1)
    stream(rig, "b", 2)
    steps(rig).clear()
    began_s = rig.clock.now
    rig.core.add_request(request("long", prompt(3, 900), max_tokens=3))
    outputs = rig.run()
    assert_in_time(token_times(rig, "b"), began_s)
    chunks = [work["long"] for _, work in steps(rig) if work.get("long", 0) > 1]
    assert sum(chunks) == 900
    # 50 ms less 22 ms for both streams is enough for 23 tokens; then the streams have ended.
    assert set(chunks[:20]) == {23}
    for name, seed in (("a", 1), ("b", 2), ("long", 3)):
        length = 900 if name == "long" else 20
        tokens = outputs[name].token_ids
        assert tokens == list(expected_tokens(prompt(seed, length), len(tokens)))
    rig.assert_clean()


def test_without_a_target_a_prompt_takes_half_of_a_step() -> None:
    rig = measured()
    stream(rig, "a", 1, tpot_s=None)
    steps(rig).clear()
    rig.core.add_request(request("long", prompt(3, 900), max_tokens=3))
    rig.run()
    assert steps(rig)[0][1] == {"a": 1, "long": 256}


def test_before_anything_is_measured_nothing_is_paced() -> None:
    rig = timed()
    stream(rig, "a", 1)
    steps(rig).clear()
    rig.core.add_request(request("long", prompt(3, 900), max_tokens=3))
    rig.step()
    assert steps(rig)[0][1] == {"a": 1, "long": 256}


def test_a_handed_over_stream_is_paced_too() -> None:
    rig = measured()
    asked = request("a", prompt(1, 20), max_tokens=100, tpot_s=TPOT_S)
    token = hand_over(Rig(num_blocks=2000), rig, asked)
    assert token is not None
    rig.core.release_writer(1)
    rig.core.admit(1, token)
    began_s = rig.clock.now
    steps(rig).clear()
    rig.core.add_request(request("long", prompt(3, 900), max_tokens=3))
    rig.run()
    assert_in_time(token_times(rig, "a"), began_s)
    rig.assert_clean()


def test_a_prompt_that_fits_into_no_block_does_not_stop_streams() -> None:
    rig = measured(num_blocks=80)
    stream(rig, "a", 1)
    rig.core.add_request(request("long", prompt(3, 280), max_tokens=3))
    outputs = rig.run()
    assert len(outputs["a"].token_ids) == 200 or outputs["a"].finish_reason is not None
    assert outputs["long"].token_ids == list(expected_tokens(prompt(3, 280), len(outputs["long"].token_ids)))
    rig.assert_clean()


def test_prompts_get_on_where_steps_are_far_slower_than_the_target() -> None:
    rig = measured()
    stream(rig, "a", 1, tpot_s=STEP_S / 4)
    steps(rig).clear()
    rig.core.add_request(request("long", prompt(3, 300), max_tokens=3))
    rig.run()
    chunks = [work["long"] for _, work in steps(rig) if work.get("long", 0) > 1]
    assert set(chunks[:-1]) == {MIN_PROMPT_TOKENS}


def ask(rig: Rig, name: str, tokens: int, within_s: float | None, **fields: object) -> None:
    due_s = math.inf if within_s is None else rig.clock.now + within_s
    seed = int.from_bytes(name.encode(), "big")
    rig.core.add_request(request(name, prompt(seed, tokens), prefill_only=True, first_due_s=due_s, **fields))


def served(rig: Rig) -> list[str]:
    """Runs to the end and returns whose first token came in which order."""
    rig.run()
    ended = {name: now for now, work in steps(rig) for name in work}
    for name in list(rig.outputs):
        rig.core.release_held(name)
    rig.assert_clean()
    return sorted(ended, key=lambda name: ended[name])


def test_prompts_are_served_by_deadline() -> None:
    rig = measured(max_running_requests=1)
    ask(rig, "never", 100, None)
    ask(rig, "third", 100, 3.0)
    ask(rig, "first", 100, 1.0)
    ask(rig, "second", 100, 2.0)
    assert served(rig) == ["first", "second", "third", "never"]


def test_a_class_goes_before_lower_ones_even_when_it_is_late() -> None:
    rig = measured()
    ask(rig, "batch", 1000, 5.0, precedence=Precedence(class_rank=-1))
    ask(rig, "late", 1000, 0.1)
    assert served(rig) == ["late", "batch"]


def test_priorities_and_deadlines_order_a_tenant_s_own_prompts_alone() -> None:
    rig = measured()
    ask(rig, "other", 200, 9.0, precedence=Precedence(tenant_key=2))
    ask(rig, "low", 200, 1.0, precedence=Precedence(tenant_key=1))
    ask(rig, "high", 200, 2.0, precedence=Precedence(tenant_key=1, within_tenant=1))
    assert served(rig) == ["other", "high", "low"]


def test_an_expired_prompt_of_low_priority_makes_no_urgent_one_late() -> None:
    rig = measured()
    mine = Precedence(tenant_key=1)
    ask(rig, "low", 500, -1.0, precedence=mine)
    ask(rig, "other", 200, 0.6, precedence=Precedence(tenant_key=2))
    ask(rig, "high", 200, 0.5, precedence=replace(mine, within_tenant=1))
    assert served(rig) == ["high", "other", "low"]


def test_a_tenant_gains_no_turns_by_leaving_one_that_it_does_not_want() -> None:
    """Its first prompt waits with a low priority, while more urgent ones come and go in its turn."""
    turns = {}
    for priority in (0, 1):
        rig = measured(num_blocks=20_000)
        mine = Precedence(tenant_key=1)
        ask(rig, "mine", 200, 3.0, precedence=mine)
        for index in range(8):
            ask(rig, f"other-{index}", 200, 3.1 + index, precedence=Precedence(tenant_key=2))
            wanted = replace(mine, within_tenant=priority)
            ask(rig, f"mine-{index}", 200, 3.2 + index, precedence=wanted)
            rig.step()
        turns[priority] = [name.startswith("mine") for name in served(rig)]
    assert turns[0] == turns[1]


def interrupted(rig: Rig) -> list[Sequence]:
    return [
        each for each in rig.core._live.values() if each.status is SequenceStatus.WAITING and each.num_output
    ]


@pytest.mark.parametrize("tpot_s", [TPOT_S, None])
def test_an_interrupted_answer_goes_before_prompts(tpot_s: float | None) -> None:
    rig = measured(num_blocks=150, max_running_requests=4, max_bypasses=0)
    targets: dict[str, Any] = {
        "tpot_s": tpot_s,
        "first_due_s": math.inf if tpot_s is None else rig.clock.now + 1.0,
    }
    for index in range(3):
        rig.core.add_request(request(f"r{index}", prompt(index, 100), max_tokens=120, **targets))
    while not (again := interrupted(rig)):
        rig.step()
    for index in range(6):
        ask(rig, f"short-{index}", 20, 0.5)
    began = len(steps(rig))
    outputs = rig.run()
    computed = [name for _, work in steps(rig)[began:] for name, tokens in work.items() if tokens > 1]
    assert computed[0] == again[0].request_id
    assert all(outputs[f"r{index}"].finish_reason is not None for index in range(3))
    for index in range(6):
        rig.core.release_held(f"short-{index}")
    rig.assert_clean()


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_the_same_whatever_is_paced_and_preempted(seed: int) -> None:
    chance = random.Random(seed)
    rig = measured(num_blocks=120, max_running_requests=6)
    asked = {}
    for index in range(14):
        tpot_s, within_s = chance.choice(((None, math.inf), (TPOT_S, math.inf), (0.001, 0.2)))
        name, tokens = f"r{index}", chance.randint(1, 150)
        asked[name] = prompt(seed * 100 + index, tokens)
        targets: dict[str, Any] = {"tpot_s": tpot_s, "first_due_s": rig.clock.now + within_s}
        rig.core.add_request(request(name, asked[name], max_tokens=chance.randint(1, 120), **targets))
        for _ in range(chance.randint(0, 20)):
            rig.step()
    outputs = rig.run()
    for name, tokens in asked.items():
        assert outputs[name].finish_reason is not None
        got = outputs[name].token_ids
        assert got[:-1] == list(expected_tokens(tokens, len(got)))[: len(got) - 1]
    rig.assert_clean()
