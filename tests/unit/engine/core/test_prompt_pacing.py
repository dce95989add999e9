"""Prompts beside streams with targets, and prompts with targets: paced and ordered, with the same tokens as ever.

Time is the rig's: a step takes what the runner says it does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine.core.precedence import Precedence
from engine.core.types import SampledToken, ScheduledSequence
from engine.pacing.token_clock import HELD_S, MAX_GAP_S, MIN_CHUNK_TOKENS, UNMEASURED_TOKENS, ServiceTargets
from engine.runner.simulated_runner import expected_tokens
from kv_transfer.transports.transport import KvMemoryRegion
from tests.support.engine.engine_rig import Clock, Rig, Script, hand_over, request

STEP_S, SEQUENCE_S, TOKEN_S = 0.02, 1e-3, 1.2e-3
TPOT_S = 0.05
TARGETS = ServiceTargets(tpot_s=TPOT_S)


class Timed(Script):
    """Advances the clock by what a step takes, and keeps who computed how many tokens."""

    clock = Clock()
    slower = 1.0
    base_s = 0.0
    """Of a step that computes prompts, beside its tokens."""

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        decodes = [each for each in batch if each.num_new == 1]
        tokens = sum(each.num_new for each in batch) - len(decodes)
        taken_s = (STEP_S + SEQUENCE_S * len(decodes) if decodes else 0.0) + TOKEN_S * tokens
        taken_s += self.base_s if tokens else 0.0
        self.clock.now += self.slower * taken_s
        self.steps.append((self.clock.now, {each.request_id: each.num_new for each in batch}))
        return super().execute(batch)

    steps: list[tuple[float, dict[str, int]]]
    lends = 1.0

    @property
    def speedup(self) -> float:
        return self.lends


class TimedOnDevice(Timed):
    """The same, with blocks that are taken for a device's."""

    @property
    def pool_memory(self) -> KvMemoryRegion:
        return replace(super().pool_memory, memory_kind="VRAM")


def timed(kind: type[Timed] = Timed, **overrides: int | bool) -> Rig:
    values = {"num_blocks": 2000, "max_step_tokens": 512, "prefix_cache": False, **overrides}
    rig = Rig(kind=kind, **values)
    assert isinstance(rig.runner, Timed)
    rig.runner.clock, rig.runner.steps = rig.clock, []
    return rig


def measured(kind: type[Timed] = Timed, **overrides: int | bool) -> Rig:
    """A rig whose engine has measured prompts and decode steps."""
    rig = timed(kind, **overrides)
    for index, tokens in enumerate((100, 100, 200, 200, 100, 200, 30, 30)):
        rig.core.add_request(request(f"warm-{index}", prompt(index, tokens), max_tokens=5))
        rig.run()
    steps(rig).clear()
    return rig


def steps(rig: Rig) -> list[tuple[float, dict[str, int]]]:
    assert isinstance(rig.runner, Timed)
    return rig.runner.steps


def prompt(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed).randrange(97, 122) for _ in range(tokens)]


def stream(rig: Rig, name: str, seed: int, targets: ServiceTargets | None = TARGETS) -> None:
    """Adds a stream and runs the engine until it has its first token."""
    rig.core.add_request(request(name, prompt(seed, 20), max_tokens=200, targets=targets))
    while name not in rig.outputs:
        rig.step()


def token_times(rig: Rig, name: str) -> list[float]:
    """When each token of a stream came, from the first step in `steps` on in which it decodes."""
    return [now for now, work in steps(rig) if work.get(name) == 1]


def assert_in_time(times: list[float], first_s: float) -> None:
    for count, now in enumerate(times, start=1):
        assert now - first_s <= TPOT_S * count + 1e-6
    assert len(times) > 10
    assert max(after - before for before, after in pairwise([first_s, *times])) <= MAX_GAP_S + 1e-6


def test_a_long_prompt_comes_in_without_making_streams_late() -> None:
    rig = measured()
    stream(rig, "a", 1)
    stream(rig, "b", 2)
    steps(rig).clear()
    began_s = rig.clock.now
    asked = request("long", prompt(3, 900), max_tokens=3)
    rig.core.add_request(asked)
    outputs = rig.run()
    assert_in_time(token_times(rig, "b"), began_s)
    chunks = [work["long"] for _, work in steps(rig) if work.get("long", 0) > 1]
    assert sum(chunks) == 900
    assert min(chunks[:-1]) >= MIN_CHUNK_TOKENS
    # Each in a step of its own.
    assert all(len(work) == 1 for _, work in steps(rig) if max(work.values()) > 1)
    for name, seed in (("a", 1), ("b", 2), ("long", 3)):
        length = 900 if name == "long" else 20
        tokens = outputs[name].token_ids
        assert tokens == list(expected_tokens(prompt(seed, length), len(tokens)))
    rig.assert_clean()


def test_on_a_device_chunks_are_computed_beside_decodes() -> None:
    rig = measured(TimedOnDevice)
    stream(rig, "a", 1)
    steps(rig).clear()
    began_s = rig.clock.now
    rig.core.add_request(request("long", prompt(3, 900), max_tokens=3))
    rig.run()
    assert_in_time(token_times(rig, "a"), began_s)
    chunks = [work for _, work in steps(rig) if work.get("long", 0) > 1]
    assert sum(work["long"] for work in chunks) == 900
    assert all(work.get("a") == 1 for work in chunks if work["long"] != 900)


def test_without_a_target_a_prompt_takes_what_a_step_has() -> None:
    rig = measured()
    stream(rig, "a", 1, targets=None)
    steps(rig).clear()
    rig.core.add_request(request("long", prompt(3, 900), max_tokens=3))
    rig.run()
    assert steps(rig)[0][1] == {"a": 1, "long": 511}


def test_before_anything_is_measured_nothing_is_paced() -> None:
    rig = timed()
    stream(rig, "a", 1)
    steps(rig).clear()
    rig.core.add_request(request("long", prompt(3, 900), max_tokens=3))
    rig.step()
    assert steps(rig)[0][1] == {"a": 1, "long": 511}


@pytest.mark.parametrize(("streams", "slower"), [(20, 1.8), (2, 2.6)])
def test_while_the_machine_is_slow_prompts_do_not_become_streams_that_nobody_can_keep(
    streams: int, slower: float
) -> None:
    """25 streams leave no time; each further one would make all late, and last so much longer. Seen on two cores: 14
    streams became 60 in seconds, and stayed; and 3, each slow alone, became 46."""
    rig = measured(max_running_requests=100)
    for number in range(80):
        rig.core.add_request(request(f"r{number}", prompt(number, 60), max_tokens=120, targets=TARGETS))
    while len(rig.outputs) < streams + 8:  # those of `measured` among them
        rig.step()
    steps(rig).clear()
    assert isinstance(rig.runner, Timed)
    rig.runner.slower = slower
    until_s = rig.clock.now + 3
    while rig.clock.now < until_s:
        rig.step()
    rig.runner.slower, after = 1.0, len(steps(rig))
    rig.run()
    decodes = [sum(tokens == 1 for tokens in work.values()) for _, work in steps(rig)]
    assert max(decodes) <= 30
    assert max(len(work) for _, work in steps(rig)[after:]) > 10, "and are computed again once it is not"
    late = 0
    for number in range(80):
        times = token_times(rig, f"r{number}")
        late += (times[-1] - times[0]) / (len(times) - 1) > TPOT_S
    assert late <= 25, "those that were there while it was slow"
    rig.assert_clean()


def test_one_stream_with_a_tight_target_holds_no_prompt_back() -> None:
    """A step with it alone takes 21 ms, so that it could be kept, were there nobody else."""

    def takes_s(tpot_s: float) -> float:
        rig = measured()
        for number in range(12):
            stream(rig, f"r{number}", number, ServiceTargets(tpot_s=0.1))
        stream(rig, "tight", 99, ServiceTargets(tpot_s=tpot_s))
        began_s = rig.clock.now
        rig.core.add_request(request("next", prompt(77, 400), max_tokens=3))
        while "next" not in rig.outputs:
            rig.step()
        return rig.clock.now - began_s

    assert takes_s(0.022) < 2 * takes_s(0.1)


def test_streams_without_targets_hold_no_prompt_back_for_those_that_have_one() -> None:
    """They may last for long: what one stream misses because of them is missed in any case."""
    rig = measured(max_running_requests=100)
    for number in range(40):
        rig.core.add_request(request(f"r{number}", prompt(number, 60), max_tokens=400))
    while len(rig.outputs) < 40 + 8:
        rig.step()
    stream(rig, "paced", 99)
    steps(rig).clear()
    began_s = rig.clock.now
    rig.core.add_request(request("late", prompt(77, 400), max_tokens=3))
    while "late" not in rig.outputs:
        rig.step()
    assert rig.clock.now - began_s < 2.5


def test_a_handed_over_stream_is_paced_too() -> None:
    rig = measured()
    asked = request("a", prompt(1, 20), max_tokens=100, targets=TARGETS)
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
    stream(rig, "a", 1, targets=ServiceTargets(tpot_s=STEP_S / 4))
    steps(rig).clear()
    rig.core.add_request(request("long", prompt(3, 300), max_tokens=3))
    rig.run()
    times = [now for now, work in steps(rig) if work.get("long", 0) > 1]
    assert all(after - before <= HELD_S + 0.2 for before, after in pairwise(times))


@pytest.mark.parametrize("slower", [1 / 1.5, 1.5])
def test_a_stream_keeps_its_mean_when_steps_take_another_time_than_before(slower: float) -> None:
    rig = measured()
    assert isinstance(rig.runner, Timed)
    rig.runner.slower = slower
    stream(rig, "a", 1)
    began_s = rig.clock.now
    steps(rig).clear()
    for index in range(3):
        rig.core.add_request(request(f"p{index}", prompt(3 + index, 400), max_tokens=3))
    rig.run()
    times = token_times(rig, "a")
    assert (times[-1] - began_s) / len(times) <= TPOT_S


def first_within(rig: Rig, seconds: float) -> ServiceTargets:
    """A target for the first token, which is due so many seconds from now."""
    return ServiceTargets(ttft_s=seconds, first_due_s=rig.clock.now + seconds)


def ask(rig: Rig, name: str, tokens: int, within_s: float | None, **fields: object) -> None:
    targets = None if within_s is None else first_within(rig, within_s)
    seed = int.from_bytes(name.encode(), "big")
    rig.core.add_request(request(name, prompt(seed, tokens), prefill_only=True, targets=targets, **fields))


def served(rig: Rig) -> list[str]:
    """Runs to the end and returns whose first token came in which order."""
    rig.run()
    ended = {name: now for now, work in steps(rig) for name in work}
    for name in list(rig.outputs):
        rig.core.release_held(name)
    rig.assert_clean()
    return sorted(ended, key=lambda name: ended[name])


def test_a_long_prompt_gives_way_to_those_that_it_would_make_late() -> None:
    rig = measured()
    ask(rig, "long", 2000, 2.0)  # takes 2.4 s
    rig.step()
    for index in range(5):
        ask(rig, f"short-{index}", 100, 1.0)
    rig.step()
    assert rig.core.load().late_prompts == 1
    assert served(rig) == [*(f"short-{index}" for index in range(5)), "long"]
    assert rig.core.load().late_prompts == 0


def test_who_can_be_in_time_is_served_by_deadline() -> None:
    rig = measured()
    for name, within_s in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("whenever", None)):
        ask(rig, name, 200, within_s)
    assert served(rig) == ["a", "b", "c", "whenever"]


@pytest.mark.parametrize(
    ("kind", "base_s", "at_once"),
    [(Timed, 0.03, 1), (TimedOnDevice, 0.0, 1), (TimedOnDevice, 0.03, 3)],
    ids=["steps of their own", "a step costs nothing", "a step costs much"],
)
def test_prompts_share_a_step_where_that_pays(kind: type[Timed], base_s: float, at_once: int) -> None:
    """Else the first one would wait for the others. Where streams have steps of their own, so has a prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timed, "base_s", base_s)
        rig = measured(kind)
        for name in ("a", "b", "c"):
            ask(rig, name, 8, 1.0)
        served(rig)
        assert max(len(work) for _, work in steps(rig)) == at_once


def test_a_prompt_that_is_interrupted_does_not_share_the_step_of_the_urgent_one() -> None:
    rig = measured()
    ask(rig, "long", 400, 9.0)
    rig.step()
    ask(rig, "soon", 140, 0.4)
    served(rig)
    assert all(len(work) == 1 for _, work in steps(rig)), steps(rig)


def test_a_prompt_that_is_in_time_with_lent_cores_is_not_late() -> None:
    """It takes 1.44 s alone. What was lent of late halves that, as prompts with and without show."""
    order = {}
    for lends in (1.0, 2.0):
        rig = measured()
        assert isinstance(rig.runner, Timed)
        for number in range(200):
            rig.runner.lends = lends if number % 5 or number > 99 else 1.0
            rig.runner.slower = 1 / rig.runner.lends
            ask(rig, f"before-{number}", 100, 1.0)
            served(rig)
        steps(rig).clear()
        ask(rig, "long", 1200, 0.9)
        ask(rig, "short", 100, 1.0)
        order[lends] = served(rig)
    assert order == {1.0: ["short", "long"], 2.0: ["long", "short"]}


def test_a_chunk_takes_a_fifth_of_the_target_at_most() -> None:
    rig = measured()
    ask(rig, "long", 400, 1.0)
    served(rig)
    took_s = [after[0] - before[0] for before, after in pairwise(steps(rig))]
    assert len(took_s) == 2
    assert max(took_s) <= 0.2 + 1e-6


def test_a_class_goes_before_lower_ones_even_when_it_is_late() -> None:
    rig = measured()
    ask(rig, "batch", 50, 5.0, precedence=Precedence(class_rank=-1))
    ask(rig, "late", 1000, 0.1)
    assert served(rig) == ["late", "batch"]


def test_priorities_trade_due_times_within_a_tenant() -> None:
    rig = measured()
    ask(rig, "other", 200, 1.5, precedence=Precedence(tenant_key=2))
    ask(rig, "low", 200, 1.0, precedence=Precedence(tenant_key=1))
    ask(rig, "high", 200, 2.0, precedence=Precedence(tenant_key=1, within_tenant=1))
    assert served(rig) == ["high", "other", "low"]


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


@pytest.mark.parametrize("tpot_s", [TPOT_S, None])
def test_an_interrupted_answer_goes_before_prompts(tpot_s: float | None) -> None:
    rig = measured(num_blocks=150, max_running_requests=4, max_bypasses=0)
    targets = replace(first_within(rig, 1.0), tpot_s=tpot_s)
    for index in range(3):
        rig.core.add_request(request(f"r{index}", prompt(index, 100), max_tokens=120, targets=targets))
    while not (again := [each for each in rig.core._scheduler.waiting.in_order() if each.num_output]):
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


@pytest.mark.parametrize("late", [True, False])
def test_a_late_prompt_gives_up_its_blocks_before_a_later_one_does(late: bool) -> None:
    rig = measured()
    within = first_within(rig, 0.2 if late else 5.0)
    rig.core.add_request(request("first", prompt(1, 700), max_tokens=3, targets=within))
    rig.step()
    rig.clock.now += 0.15
    rig.core.add_request(request("second", prompt(2, 100), max_tokens=3, targets=first_within(rig, 0.5)))
    rig.step()
    victim = rig.core._scheduler._victim()
    assert victim.remaining > 1
    assert victim.request_id == ("first" if late else "second")
    rig.run()
    rig.assert_clean()


def test_chunks_stay_short_where_all_are_late() -> None:
    rig = measured()
    for index in range(4):
        ask(rig, f"p{index}", 400, 0.5)
    for index in range(4):  # late, and could have been in time
        ask(rig, f"q{index}", 300, 0.45)
    rig.clock.now += 0.5
    rig.step()
    assert rig.core.load().late_prompts == 8
    assert max(sum(work.values()) for _, work in steps(rig)) * TOKEN_S <= 0.1 + 1e-6
    served(rig)


def test_a_target_that_nobody_can_keep_makes_no_chunk_shorter() -> None:
    rig = measured()
    ask(rig, "long", 400, 1.0)
    ask(rig, "hasty", 400, 0.001)
    rig.step()
    assert steps(rig)[0][1] == {"long": 166}


def test_a_late_prompt_gets_its_tenth_beside_an_endless_stream_of_others() -> None:
    rig = measured(num_blocks=20_000)
    ask(rig, "long", 1000, 0.5)
    for index in range(300):
        ask(rig, f"short-{index}", 100, 0.4)
        ask(rig, f"tiny-{index}", 20, 0.4)
        rig.step()
        if "long" in rig.outputs:
            break
    computed = sum(sum(work.values()) for _, work in steps(rig))
    assert computed <= 10 * 1000 + 2 * 1000
    assert len(served(rig)) > 60


def test_a_cached_prefix_makes_a_prompt_short() -> None:
    rig = measured(prefix_cache=True)
    known = prompt(1, 1000)
    rig.core.add_request(request("before", known, prefill_only=True))
    rig.run()
    rig.core.release_held("before")
    steps(rig).clear()
    ask(rig, "other", 300, 0.7)
    targets = first_within(rig, 0.65)
    asked = request("again", known + prompt(2, 50), prefill_only=True, targets=targets)
    rig.core.add_request(asked)
    assert served(rig) == ["again", "other"]


def test_prompts_that_share_a_prefix_are_short_once_the_first_has_computed_it() -> None:
    rig = measured(prefix_cache=True)
    shared, names = prompt(100, 1000), [f"share-{index}" for index in range(5)]
    for seed, name in enumerate(names, 101):
        targets = first_within(rig, 2.0)
        rig.core.add_request(request(name, shared + prompt(seed, 20), prefill_only=True, targets=targets))
    ask(rig, "other", 600, 2.5)
    rig.step()
    assert rig.core.load().late_prompts > 0, "each takes 1.2 s, as far as is known"
    while "share-0" not in rig.outputs:
        rig.step()
    rig.step()
    assert rig.core.load().late_prompts == 0
    assert served(rig) == [*names, "other"]


def test_the_clock_counts_what_a_prompt_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the turn of a conversation is no long prompt, and its chunk is measured after what is cached."""
    rig = measured(prefix_cache=True)
    known = prompt(1, 1000)
    rig.core.add_request(request("before", known, prefill_only=True))
    rig.run()
    rig.core.release_held("before")
    stream(rig, "stream", 7)
    asked: list[tuple[int, int]] = []
    grant = rig.core._pacing.clock.grant

    def granted(*given: Any, remaining: int, context_tokens: int, **others: Any) -> int:
        asked.append((remaining, context_tokens))
        return grant(*given, remaining=remaining, context_tokens=context_tokens, **others)

    monkeypatch.setattr(
        type(rig.core._pacing.clock), "grant", lambda self, *given, **named: granted(*given, **named)
    )
    targets = first_within(rig, 0.5)
    turn = [*known, *prompt(2, 5)]
    rig.core.add_request(request("turn", turn, prefill_only=True, targets=targets))
    rig.step()
    cached = len(turn) - asked[0][0]
    assert asked[0] == (len(turn) - cached, cached)
    assert len(known) - 16 < cached <= len(known)


def test_an_answer_that_comes_back_begins_its_times_anew() -> None:
    """Also one whose blocks are still cached, so that it decodes at once: else what it waited would hold prompts up."""
    rig = measured(num_blocks=60, prefix_cache=True)
    for index in range(2):
        rig.core.add_request(request(f"r{index}", prompt(index, 100), max_tokens=200, targets=TARGETS))
    while not (again := [each for each in rig.core._scheduler.waiting.in_order() if each.num_output]):
        rig.step()
    (victim,) = again
    assert victim.pace is None
    rig.clock.now += 30.0
    rig.run()
    assert victim.pace is not None
    assert rig.clock.now - victim.pace.first_s < 30.0
    rig.assert_clean()


def test_far_fewer_are_late_than_in_order_of_arrival() -> None:
    late = {}
    for triaged in (True, False):
        rig, chance, due = measured(num_blocks=20_000), random.Random(5), {}
        for index in range(60):  # 1.5 times as many as can be served
            due[f"p{index}"] = arrives_s = 200.0 + 0.22 * index
            while rig.clock.now < arrives_s and rig.core.has_work():
                rig.step()
            rig.clock.now = max(rig.clock.now, arrives_s)
            targets = ServiceTargets(ttft_s=1.0, first_due_s=arrives_s + 1.0) if triaged else None
            tokens = prompt(index, chance.choice((60, 100, 150, 800)))
            rig.core.add_request(request(f"p{index}", tokens, prefill_only=True, targets=targets))
        rig.run()
        ended = {name: now for now, work in steps(rig) for name in work}
        late[triaged] = sum(ended[name] > arrives_s + 1.0 for name, arrives_s in due.items())
    assert late[True] <= 0.4 * late[False]


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_the_same_whatever_is_paced_and_preempted(seed: int) -> None:
    chance = random.Random(seed)
    rig = measured(TimedOnDevice if seed % 2 else Timed, num_blocks=120, max_running_requests=6)
    asked = {}
    for index in range(14):
        targets = chance.choice(
            (None, TARGETS, ServiceTargets(tpot_s=0.001, ttft_s=0.2, first_due_s=rig.clock.now + 0.2))
        )
        name, tokens = f"r{index}", chance.randint(1, 150)
        asked[name] = prompt(seed * 100 + index, tokens)
        rig.core.add_request(request(name, asked[name], max_tokens=chance.randint(1, 120), targets=targets))
        for _ in range(chance.randint(0, 20)):
            rig.step()
    outputs = rig.run()
    for name, tokens in asked.items():
        assert outputs[name].finish_reason is not None
        got = outputs[name].token_ids
        assert got[:-1] == list(expected_tokens(tokens, len(got)))[: len(got) - 1]
    rig.assert_clean()


def test_beside_streams_prompts_begin_in_small_chunks_until_they_are_measured() -> None:
    """Decode steps are measured at the start, prompts are not."""
    rig = timed(max_step_tokens=2048)
    for _ in range(8):
        rig.core._meter.fit.record(1, 100, STEP_S + SEQUENCE_S)
    rig.core._meter.fit.refit()
    stream(rig, "a", 1)
    steps(rig).clear()
    rig.core.add_request(request("long", prompt(2, 1500), max_tokens=2))
    rig.step()
    assert steps(rig)[-1][1]["long"] == UNMEASURED_TOKENS
    while "long" not in rig.outputs:
        rig.step()
    assert rig.core._meter.prompt_fit.latest is not None


def test_tokens_within_the_target_cost_no_margin() -> None:
    """The margin is there for those that come after they are due by it."""
    rig = measured()
    stream(rig, "a", 1)
    assert isinstance(rig.runner, Timed)
    rig.runner.slower = 1.04
    for number in range(6):
        rig.core.add_request(request(f"long-{number}", prompt(2 + number, 1500), max_tokens=2))
    until_s = rig.clock.now + 12.0
    while rig.clock.now < until_s and rig.core.has_work():
        rig.step()
    assert rig.core._pacing.clock.margin.value == pytest.approx(0.95)
