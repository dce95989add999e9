"""More prompts wait than triage looks at: late ones keep no place, nobody starves, a step's cost is bounded."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.precedence import Precedence, PrecedenceQueue
from engine.core.prompt_pacing import TRIAGED, TriageWindow
from engine.core.sequence import Sequence as Prompt
from engine.core.types import SampledToken, ScheduledSequence
from engine.pacing.queue_scan import QueueScan, SeenClass, may_be_in_time
from engine.pacing.step_time_fit import PromptFit
from engine.pacing.token_clock import ServiceTargets
from tests.support.engine.engine_rig import Clock, Rig, Script, request

TOKEN_S = 1e-3
FIT = PromptFit(0.0, TOKEN_S, 0.0)


def waiting(arrival: int, tokens: int, due_s: float, **precedence: int) -> Prompt:
    asked = replace(
        request(f"r{arrival}", [97] * tokens, targets=ServiceTargets(None, 1.0, due_s)),
        precedence=Precedence(**precedence),
    )
    return Prompt(asked, arrival)


def queue_of(*prompts: Prompt) -> PrecedenceQueue[Prompt]:
    queue: PrecedenceQueue[Prompt] = PrecedenceQueue()
    for each in prompts:
        queue.push(each)
    return queue


def test_a_few_are_all_looked_at_in_order() -> None:
    prompts = [waiting(number, 10, 5.0) for number in range(TRIAGED)]
    assert TriageWindow().of(queue_of(*prompts), FIT, 100.0) == prompts


def test_late_ones_keep_no_place_and_the_oldest_and_smallest_are_known() -> None:
    late = [waiting(number, 3000 - number, 5.0) for number in range(3 * TRIAGED)]
    fresh = [waiting(1000 + number, 50, 101.0) for number in range(TRIAGED)]
    seen = TriageWindow().of(queue_of(*late, *fresh), FIT, 100.0)
    assert len(seen) == TRIAGED
    behind = [each for each in seen if each in late]
    assert behind[0] is late[0]
    assert behind[1:] == late[-15:]
    assert seen[len(behind) :] == fresh[: TRIAGED - len(behind)]


def test_what_has_been_cached_meanwhile_counts_beyond_the_window_too() -> None:
    asked = [waiting(number, 3000, 100.5) for number in range(TRIAGED)]
    other = [waiting(1000 + number, 400, 100.1) for number in range(2 * TRIAGED)]

    def expect(sequence: Prompt) -> None:
        if len(sequence.tokens) == 3000:
            sequence.expected_cached = 2990

    assert not set(TriageWindow().of(queue_of(*other, *asked), FIT, 100.0)) & set(asked[16:])
    seen = TriageWindow(expect).of(queue_of(*other, *asked), FIT, 100.0)
    assert len(set(seen) & set(asked)) >= TRIAGED - 16


def test_an_interrupted_answer_is_always_looked_at() -> None:
    late = [waiting(number, 100, 5.0) for number in range(3 * TRIAGED)]
    late[200].tokens.append(97)
    assert late[200] in TriageWindow().of(queue_of(*late), FIT, 100.0)


def test_a_tenant_s_most_urgent_one_comes_with_its_turns() -> None:
    prompts = [waiting(number, 100, 105.0, tenant_key=number % 2) for number in range(3 * TRIAGED)]
    urgent = waiting(1000, 100, 105.0, tenant_key=1, within_tenant=7)
    seen = TriageWindow().of(queue_of(*prompts, urgent), FIT, 100.0)
    assert urgent in seen
    assert len(seen) == TRIAGED + 1


def test_a_class_without_due_times_keeps_its_order() -> None:
    forever = float("inf")
    batch = [waiting(number, 3000 - number, forever, class_rank=-1) for number in range(2 * TRIAGED)]
    some = [waiting(1000 + number, 50, 101.0) for number in range(10)]
    assert TriageWindow().of(queue_of(*batch, *some), FIT, 100.0) == [*some, *batch[: TRIAGED - 10]]


def test_newcomers_are_seen_at_once_and_who_left_is_not() -> None:
    prompts = [waiting(number, 100, 105.0) for number in range(2 * TRIAGED)]
    queue, window = queue_of(*prompts), TriageWindow()
    window.of(queue, FIT, 100.0)
    late = waiting(1000, 10, 100.5)
    queue.push(late)
    window.added(late)
    for each in prompts[:10]:
        queue.discard(each)
    seen = window.of(queue, FIT, 100.0)
    assert seen == [*prompts[10:TRIAGED], late]
    for each in prompts[10:100]:
        queue.discard(each)
    assert len(window.of(queue, FIT, 100.0)) == TRIAGED, "others come in"


@pytest.mark.parametrize(("count", "most_s"), [(TRIAGED, 3e-3), (2_000, 3e-3), (20_000, 5e-3)])
def test_a_step_costs_no_more_with_more_prompts(count: int, most_s: float) -> None:
    """On average over a second of steps of 10 ms, well above what it takes: see decision 32."""
    chance = random.Random(1)
    queue = queue_of(*(waiting(n, chance.randrange(10, 300), chance.uniform(95, 105)) for n in range(count)))
    window = TriageWindow()
    began = time.process_time()
    for step in range(100):
        assert len(window.of(queue, FIT, 100.0 + step / 100)) >= TRIAGED
    assert (time.process_time() - began) / 100 < most_s


@pytest.mark.parametrize(
    "due_s", [(5.0, 6.0), (95.0, 105.0), (105.0, 200.0)], ids=["late", "mixed", "in time"]
)
def test_no_look_through_10_000_prompts_holds_a_step_up(due_s: tuple[float, float]) -> None:
    """Over all steps of some looks, in CPU time, of which other processes take nothing; 31 ms when it was one piece."""
    chance = random.Random(1)
    queue = queue_of(*(waiting(n, chance.randrange(10, 300), chance.uniform(*due_s)) for n in range(10_000)))
    window, took = TriageWindow(), list[float]()
    for step in range(60):
        began = time.process_time()
        window.of(queue, FIT, 100.0 + step / 60)
        took.append(time.process_time() - began)
    assert sorted(took)[-3] < 5e-3, "well above what it takes; two may be the collector's"


def test_a_long_queue_is_looked_through_in_parts_and_newcomers_are_among_them() -> None:
    """Once all parts were seen, the window is that of one look: the first in time, the smallest and the oldest."""
    late = [waiting(number, 3000 - number % 2999, 5.0) for number in range(5_000)]
    first, window = waiting(5_001, 50, 1e6), TriageWindow()
    queue = queue_of(*late, first)
    window.of(queue, FIT, 100.0)
    second, smallest = waiting(5_002, 50, 1e6), waiting(5_003, 1, 5.0)
    for each in (second, smallest):
        queue.push(each)
        window.added(each)
    for step in range(12):
        seen = window.of(queue, FIT, 100.0 + step / 60)
        assert len(seen) >= TRIAGED
    assert {first, second, smallest, late[0]} <= set(seen)
    assert len(seen) == TRIAGED


@settings(max_examples=30, deadline=None)
@given(st.integers(), st.integers(1, 1500), st.floats(99.0, 103.0))
def test_parts_find_what_one_look_finds(seed: int, count: int, latest_s: float) -> None:
    chance = random.Random(seed)
    queued = [waiting(n, chance.randint(1, 400), chance.uniform(99.0, latest_s)) for n in range(count)]
    whole = SeenClass[Prompt](2 * TRIAGED)
    whole.look_at(queued, TOKEN_S, 100.0)
    scan = QueueScan({0: queued}, 2 * TRIAGED)
    while not scan.go_on(512, TOKEN_S, 100.0):
        pass
    assert scan.seen[0] == whole
    possible = [each for each in queued if may_be_in_time(each, TOKEN_S, 100.0)]
    assert whole.first(TRIAGED, 0)[-min(len(possible), TRIAGED) :] == possible[:TRIAGED] or not possible


class Timed(Script):
    """Advances the clock by what prompts take."""

    clock = Clock()

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        self.clock.now += TOKEN_S * sum(each.num_new for each in batch)
        return super().execute(batch)


def prefilling(seed: int = 0) -> Rig:
    """A rig whose engine has measured what prompts take."""
    rig = Rig(kind=Timed, num_blocks=4000, max_step_tokens=512, prefix_cache=False)
    assert isinstance(rig.runner, Timed)
    rig.runner.clock = rig.clock
    for number, tokens in enumerate((100, 100, 200, 200, 100, 200, 30, 30)):
        rig.core.add_request(request(f"warm-{seed}-{number}", [97 + number] * tokens, max_tokens=1))
        rig.run()
    return rig


def ask(rig: Rig, name: str, tokens: int, target_s: float = 1.0) -> None:
    targets = ServiceTargets(None, target_s, rig.clock.now + target_s)
    rig.core.add_request(request(name, [97] * tokens, max_tokens=1, targets=targets))


def test_fresh_prompts_behind_many_late_ones_are_in_time() -> None:
    rig = prefilling()
    for number in range(3 * TRIAGED):
        ask(rig, f"late-{number}", 200, target_s=0.1)
    for _ in range(5):
        rig.step()
    began_s = rig.clock.now
    for number in range(20):
        ask(rig, f"fresh-{number}", 20)
    while not all(f"fresh-{number}" in rig.outputs for number in range(20)):
        rig.step()
    assert rig.clock.now - began_s < 1.0


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    long=st.integers(1_000, 2_000),
    shorts=st.lists(st.integers(40, 120), min_size=3, max_size=8),
    load=st.floats(1.2, 2.0),
)
def test_a_long_prompt_never_starves(long: int, shorts: list[int], load: float) -> None:
    """Short prompts come faster than they are computed, for ever, so that more wait than triage looks at."""
    rig = prefilling()
    began_s = next_s = rig.clock.now
    ask(rig, "long", long)
    for number in range(2 * TRIAGED):
        ask(rig, f"crowd-{number}", shorts[number % len(shorts)])
    count = 0
    while "long" not in rig.outputs:
        while next_s <= rig.clock.now:
            ask(rig, f"short-{count}", tokens := shorts[count % len(shorts)])
            next_s += tokens * TOKEN_S / load
            count += 1
        rig.step()
        # It gets a tenth of the work, in chunks.
        assert rig.clock.now - began_s < 10 * TOKEN_S * long + 6.0
