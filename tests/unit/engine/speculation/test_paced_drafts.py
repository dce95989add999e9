"""Streams with targets keep them with drafts on, and prompts beside them get on as they do without. In virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.core.types import SampledToken, ScheduledSequence
from engine.pacing.token_clock import ServiceTargets
from engine.runner.simulated_runner import expected_tokens
from engine.speculation.drafter import DraftRequest
from tests.support.drafters import GuessingDrafter, oracle
from tests.support.engine.engine_rig import Clock, Rig, Script, request

STEP_S, ROW_S, TOKEN_S = 0.016, 1.2e-3, 1.2e-3
TPOT_S = 0.05
TIGHT_S = 0.036
"""Little more than four streams take alone where steps take half as long again as was measured."""


class RowTimes(Script):
    """Moves the clock by what the rows of a step take: those beyond eight cost more."""

    clock = Clock()
    slower = 1.0

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        rows = sum(1 + len(each.draft) for each in batch if each.num_new == 1)
        prompt_tokens = sum(each.num_new for each in batch if each.num_new > 1)
        decode_s = STEP_S + ROW_S * rows + 2 * ROW_S * max(0, rows - 8) if rows else 0.0
        self.clock.now += self.slower * (decode_s + TOKEN_S * prompt_tokens)
        return super().execute(batch)


def guesses(right: float, seed: int = 1) -> GuessingDrafter:
    """Drafts for requests that copy, of which each token is right with this chance; none for the others."""
    pick, known = random.Random(seed), dict[str, list[int]]()

    def guess(asked: DraftRequest) -> list[int]:
        name = asked.key.request_id  # type: ignore[attr-defined]
        if not name.startswith("copy"):
            return []
        if name not in known:
            known[name] = [*asked.token_ids, *oracle(asked._replace(most=100))]
        done = len(asked.token_ids)
        return [token if pick.random() < right else 7 for token in known[name][done : done + asked.most]]

    return GuessingDrafter(guess)


@dataclass
class Load:
    """Answers in four slots, and a prompt now and then."""

    rig: Rig
    kinds: Sequence[str]
    tpot_s: float = TPOT_S
    means_s: dict[str, float] = field(default_factory=dict)
    """Mean seconds a token after the first, of each answer."""
    ttfts_s: list[float] = field(default_factory=list)

    def run(self, answers: int, prompt_every_s: float) -> None:
        pick, core, clock = random.Random(3), self.rig.core, self.rig.clock
        targets = ServiceTargets(tpot_s=self.tpot_s)
        times: dict[str, list[float]] = {}
        asked_s: dict[str, float] = {}
        open_slots = dict.fromkeys(range(len(self.kinds)), "")
        number, next_prompt_s = 0, clock.now + prompt_every_s
        while len(self.means_s) < answers:
            for slot, taken in open_slots.items():
                if not taken:
                    number += 1
                    name = open_slots[slot] = f"{self.kinds[slot]}-{number}"
                    prompt = [pick.randrange(97, 122) for _ in range(12)]
                    core.add_request(
                        request(name, prompt, max_tokens=pick.randrange(40, 90), targets=targets)
                    )
            if clock.now >= next_prompt_s:
                number, next_prompt_s = number + 1, next_prompt_s + prompt_every_s
                prompt = [pick.randrange(97, 122) for _ in range(pick.randrange(150, 350))]
                core.add_request(request(f"long-{number}", prompt, max_tokens=2))
                asked_s[f"long-{number}"] = clock.now
            self.rig.step()
            for output in self.rig.results.pop().outputs:
                name = output.request_id
                times.setdefault(name, []).extend([clock.now] * len(output.token_ids))
                if output.finish_reason is None:
                    continue
                own = times.pop(name)
                if name in asked_s:
                    self.ttfts_s.append(own[0] - asked_s[name])
                    continue
                self.means_s[name] = (own[-1] - own[0]) / (len(own) - 1)
                open_slots = {slot: "" if each == name else each for slot, each in open_slots.items()}
                self.rig.outputs.pop(name)
        for name in [*open_slots.values(), *(each for each in asked_s if each in times)]:
            core.abort(name)

    def attained(self, kind: str = "") -> float:
        means_s = [mean_s for name, mean_s in self.means_s.items() if name.startswith(kind)]
        return sum(mean_s <= self.tpot_s for mean_s in means_s) / len(means_s)

    @property
    def mean_s(self) -> float:
        return sum(self.means_s.values()) / len(self.means_s)


def measured(drafter: GuessingDrafter | None) -> Rig:
    """An engine that has measured prompts and steps."""
    rig = Rig(kind=RowTimes, drafter=drafter, num_blocks=4000, max_step_tokens=512, prefix_cache=False)
    assert isinstance(rig.runner, RowTimes)
    rig.runner.clock = rig.clock
    for index, tokens in enumerate((100, 100, 200, 200, 100, 200, 30, 30)):
        rig.core.add_request(request(f"warm-{index}", [97 + index] * tokens, max_tokens=5))
        rig.run()
    return rig


MIXED = ("copy", "copy", "free", "free")


@pytest.mark.parametrize("kinds", [MIXED, ("copy",) * 4], ids=["mixed", "copy"])
@pytest.mark.parametrize("tpot_s", [TPOT_S, TIGHT_S])
@pytest.mark.parametrize("slower", [1 / 1.5, 1.0, 1.5])
def test_targets_are_attained_with_rates_wrong_by_half_either_way(
    kinds: Sequence[str], slower: float, tpot_s: float
) -> None:
    rig = measured(guesses(right=0.85))
    assert isinstance(rig.runner, RowTimes)
    rig.runner.slower = slower
    load = Load(rig, kinds, tpot_s)
    load.run(answers=120, prompt_every_s=1.5)
    assert load.attained() >= 0.99
    assert len(load.ttfts_s) > 10
    assert rig.core.step_totals["decode"].accepted_tokens > 0


@pytest.mark.parametrize("slower", [1 / 1.5, 1.0, 1.5])
def test_who_does_not_copy_keeps_its_target_beside_those_that_do(slower: float) -> None:
    """Goodput alone would take it: the others get several tokens of each step."""
    rig = measured(guesses(right=0.95))
    assert isinstance(rig.runner, RowTimes)
    rig.runner.slower = slower
    load = Load(rig, ("copy", "copy", "copy", "free"), TIGHT_S)
    load.run(answers=120, prompt_every_s=1e9)
    assert load.attained("free") >= 0.99
    assert rig.core.step_totals["decode"].accepted_tokens > 20


def test_wrong_guesses_make_nobody_late() -> None:
    rig = measured(guesses(right=0.3))
    load = Load(rig, ("copy", "free", "free", "free"), TIGHT_S)
    load.run(answers=120, prompt_every_s=1.5)
    assert load.attained() >= 0.99


@pytest.mark.parametrize("kinds", [MIXED, ("copy",) * 4], ids=["mixed", "copy"])
def test_prompts_wait_no_longer_for_it(kinds: Sequence[str]) -> None:
    found = {}
    for drafting in (False, True):
        load = Load(measured(guesses(right=0.85) if drafting else None), kinds)
        load.run(answers=60, prompt_every_s=1.0)
        found[drafting] = sum(load.ttfts_s) / len(load.ttfts_s), load.mean_s
    assert found[True][0] <= 1.05 * found[False][0]
    assert found[True][1] <= found[False][1]


def test_drafts_take_what_streams_are_ahead_of_their_targets() -> None:
    """A stream that copies gains by it, and one beside it that does not is slower, within its target."""
    means = {}
    for drafting in (False, True):
        load = Load(measured(guesses(right=0.95) if drafting else None), ("copy", "free"))
        load.run(answers=20, prompt_every_s=1e9)
        means[drafting] = load.mean_s
        assert load.attained() == 1
    assert means[True] < 0.8 * means[False]


def test_answers_are_the_same() -> None:
    rig = measured(guesses(right=0.85))
    for name in ("copy", "free", "copy-2"):
        rig.core.add_request(
            request(name, [100, 101, len(name)], max_tokens=60, targets=ServiceTargets(tpot_s=TPOT_S))
        )
    outputs = rig.run()
    for name in ("copy", "free", "copy-2"):
        assert outputs[name].token_ids == expected_tokens([100, 101, len(name)], 60)
    rig.assert_clean()


class Capturing(RowTimes):
    """The first step of each number of rows takes ten times as long, and says so."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.seen: set[int] = set()
        self.is_first = False

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        rows = sum(each.num_new + len(each.draft) for each in batch)
        self.is_first = rows not in self.seen
        self.seen.add(rows)
        self.slower = 10.0 if self.is_first else 1.0
        return super().execute(batch)

    @property
    def prepared(self) -> bool:
        return self.is_first


def test_steps_that_capture_do_not_tell_what_rows_cost() -> None:
    found = []
    for kind in (RowTimes, Capturing):
        rig = Rig(kind=kind, drafter=guesses(1.0), num_blocks=4000, max_step_tokens=512, prefix_cache=False)
        assert isinstance(rig.runner, RowTimes)
        rig.runner.clock = rig.clock
        rig.core.add_request(request("copy", [97] * 12, max_tokens=200))
        rig.run()
        assert rig.core._speculator is not None
        found.append([rig.core._speculator._costs.step_s(rows) for rows in (1, 2, 9)])
    assert found[1] == pytest.approx(found[0], rel=0.1)
