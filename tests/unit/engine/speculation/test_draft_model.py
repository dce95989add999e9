"""A draft model keeps its KV in step with the answers: one that is the model itself is never wrong.

The simulated model's tokens are a function of all KV of a sequence, so whatever is missing, stale or of another
sequence shows as a wrong guess.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.core.engine_core import EngineCore
from engine.core.types import EngineRequest, RowsFailedError, SampledToken, ScheduledSequence
from engine.pacing.token_clock import ServiceTargets
from engine.runner.simulated_runner import expected_tokens
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafter import DraftRequest
from splitserve.config.engine import EngineConfig
from tests.support.drafters import OftenRight, VirtualClock, VirtualRunner
from tests.support.engine.byte_tokenizer import ByteTokenizer
from tests.support.engine.engine_rig import BLOCK, INSTANT, request

STEP_S, TOKEN_S = 0.01, 0.001
CHEAP = 0.1
"""What the draft model takes, as a share of what the model does."""


class DraftRig:
    """An engine in virtual time, with a draft model or without."""

    def __init__(
        self, kind: type[VirtualRunner] | None = VirtualRunner, cost: float = CHEAP, **settings: object
    ) -> None:
        values = {
            "block_size_tokens": BLOCK,
            "num_blocks": 1024,
            "max_step_tokens": 64,
            **INSTANT,
            **settings,
        }
        config = EngineConfig.model_validate(values)
        self.clock = VirtualClock()
        self.runner = VirtualRunner(config, self.clock, STEP_S, TOKEN_S)
        self.draft_runner: VirtualRunner | None = None
        self.model: DraftModel | None = None
        if kind is not None:
            self.draft_runner = kind(config, self.clock, cost * STEP_S, cost * TOKEN_S)
            self.model = DraftModel(self.draft_runner, 257, clock=self.clock)
            self.model.warm_up(8)
        self.core = EngineCore(self.runner, config, ByteTokenizer(), self.clock, self.model)
        self.began_s = self.clock.now
        self.tokens: dict[str, list[int]] = {}
        self.times: dict[str, list[float]] = {}

    def run(self) -> dict[str, list[int]]:
        while self.core.has_work():
            self.step()
        return dict(sorted(self.tokens.items()))

    def step(self) -> None:
        for output in self.core.step().outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.times.setdefault(output.request_id, []).extend([self.clock.now] * len(output.token_ids))

    def answers(self, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
        for one in requests:
            self.core.add_request(one)
        return self.run()

    @property
    def elapsed_s(self) -> float:
        return self.clock.now - self.began_s

    @property
    def accepted(self) -> tuple[int, int]:
        totals = self.core.step_totals["decode"]
        return totals.drafted_tokens, totals.accepted_tokens


def prompts(
    seed: int, count: int, longest: int = 60, tpot_s: float | None = 3 * STEP_S
) -> list[EngineRequest]:
    """Prompts of any length, with room for drafts; some have output of an earlier attempt."""
    pick = random.Random(seed)
    found = []
    for number in range(count):
        tokens = [pick.randrange(32, 127) for _ in range(pick.randrange(1, longest))]
        prior = pick.randrange(8) if number % 2 else 0
        tokens += expected_tokens(tokens, prior) if prior else []
        found.append(request(f"r{number}", tokens, max_tokens=80, prior_output_tokens=prior))
        stop = replace(found[-1].stop, max_tokens=pick.randrange(60, 300))
        found[-1] = replace(found[-1], stop=stop, targets=ServiceTargets(tpot_s=tpot_s))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_blocks", [1024, 120])
def test_a_model_that_drafts_for_itself_is_never_wrong(seed: int, num_blocks: int) -> None:
    """Also when sequences are preempted and start again, share prefixes, and are left out for some steps."""
    asked = prompts(seed, 4)
    shared = replace(asked[0], request_id="shared", precedence=asked[1].precedence)
    plain, rig = DraftRig(None, num_blocks=num_blocks), DraftRig(num_blocks=num_blocks)
    expected = plain.answers([*asked, shared])
    assert rig.answers([*asked, shared]) == expected
    drafted, accepted = rig.accepted
    assert drafted == accepted > 50
    assert rig.elapsed_s < plain.elapsed_s


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_without_where_it_is_often_wrong(seed: int) -> None:
    asked = prompts(seed, 3)
    plain, rig = DraftRig(None, num_blocks=160), DraftRig(OftenRight, num_blocks=160)
    assert rig.answers(asked) == plain.answers(asked)
    drafted, accepted = rig.accepted
    assert 0.5 * drafted < accepted < drafted
    assert rig.elapsed_s < 0.97 * plain.elapsed_s


def test_what_costs_as_much_as_the_model_is_left_alone() -> None:
    asked = prompts(1, 2, longest=12, tpot_s=None)
    plain, rig = DraftRig(None), DraftRig(cost=1.0)
    assert rig.answers(asked) == plain.answers(asked)
    assert rig.elapsed_s <= plain.elapsed_s / 0.97


class SlowAtFirst(VirtualRunner):
    """Takes as long as the model as long as something else computes on its cores."""

    slow_steps = math.inf

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        self.slow_steps -= 1
        before = self._virtual.now
        found = super().execute(batch)
        if self.slow_steps >= 0:
            self._virtual.now = before + 10 * (self._virtual.now - before)
        return found


def long_answers(count: int, tokens: int) -> list[EngineRequest]:
    asked = prompts(1, count, longest=12, tpot_s=3 * STEP_S)
    return [replace(each, stop=replace(each.stop, max_tokens=tokens)) for each in asked]


@pytest.mark.parametrize("slow_steps", [10, math.inf])
def test_times_of_a_start_that_was_disturbed_do_not_close_it_for_good(
    monkeypatch: pytest.MonkeyPatch, slow_steps: float
) -> None:
    """Where the whole warm-up was, it is measured anew after FORGET_AFTER steps in which it was not asked."""
    monkeypatch.setattr(SlowAtFirst, "slow_steps", slow_steps)
    asked = long_answers(1, 3000)
    plain, rig = DraftRig(None), DraftRig(SlowAtFirst)
    assert isinstance(rig.draft_runner, SlowAtFirst)
    rig.draft_runner.slow_steps = 0
    assert rig.answers(asked) == plain.answers(asked)
    assert rig.elapsed_s < (0.9 if slow_steps == math.inf else 0.6) * plain.elapsed_s


def test_a_stretch_that_cannot_be_guessed_does_not_close_an_answer_for_good() -> None:
    """Later guesses would be right. Each costs a third of a step, so they are tried again, but seldom."""

    class RightLater(VirtualRunner):
        wrong = True

        def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
            found = super().execute(batch)
            return [SampledToken(1) if each is not None and self.wrong else each for each in found]

    rig = DraftRig(RightLater, cost=0.33)
    assert isinstance(rig.draft_runner, RightLater)
    (asked,) = long_answers(1, 3000)
    rig.core.add_request(asked)
    while len(rig.tokens.get(asked.request_id, ())) < 600:
        rig.step()
    assert rig.accepted[1] == 0
    rig.draft_runner.wrong = False
    rig.run()
    assert rig.accepted[1] > 500


def test_a_long_prompt_is_read_within_what_the_stream_is_ahead() -> None:
    """Without a target that is 0.03 of each plain step: nothing is read for a short answer, and it loses nothing."""
    prompt = list(b"abcdefghij" * 40)
    for count, drafts in ((20, False), (900, True)):
        plain, rig = DraftRig(None), DraftRig()
        asked = request(prompt=prompt, max_tokens=count)
        asked = replace(asked, stop=replace(asked.stop, ignore_eos=True))
        assert rig.answers([asked]) == plain.answers([asked])
        assert (rig.accepted[1] > 0) == drafts
        spent, without = (each.clock.now - each.times["r"][0] for each in (rig, plain))
        assert spent <= without / 0.965
        if drafts:
            assert spent < 0.8 * without


def test_streams_with_targets_stay_in_time_while_prompts_are_read() -> None:
    tpot_s = 1.6 * STEP_S
    rig = DraftRig(max_step_tokens=1024)
    asked = []
    for number in range(3):
        one = request(f"r{number}", [*list(b"lorem ipsum dolor " * 20), 65 + number], max_tokens=300)
        stop = replace(one.stop, ignore_eos=True)
        asked.append(replace(one, stop=stop, targets=ServiceTargets(tpot_s=tpot_s)))
    rig.answers(asked)
    assert rig.accepted[1] > 100
    for times in rig.times.values():
        for place in range(30, len(times)):
            assert (times[place] - times[0]) / place <= tpot_s
        assert max(b - a for a, b in pairwise(times)) < 10 * STEP_S


def test_a_prefix_that_was_read_once_is_not_read_again() -> None:
    rig = DraftRig()
    assert rig.draft_runner is not None
    first = request("a", list(b"system prompt, the same for all. " * 4), max_tokens=700)
    first = replace(first, stop=replace(first.stop, ignore_eos=True))
    rig.answers([first])
    second = request("b", [*first.token_ids, *rig.tokens["a"][:40], 65, 66], max_tokens=20)
    before = rig.draft_runner.computed
    rig.answers([replace(second, stop=replace(second.stop, ignore_eos=True))])
    drafted, accepted = rig.accepted
    assert drafted == accepted
    assert rig.draft_runner.computed - before < 40


def test_nothing_is_kept_of_sequences_that_ended() -> None:
    rig = DraftRig()
    assert rig.model is not None
    for one in prompts(3, 4):
        rig.core.add_request(one)
    for _ in range(3):
        rig.core.step()
    rig.core.abort("r1")
    rig.run()
    assert not rig.model._known


class Broken(VirtualRunner):
    """Fails for what `bad` names."""

    bad = ""

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        rows = tuple(index for index, each in enumerate(batch) if each.request_id == self.bad)
        if rows:
            raise RowsFailedError("broken", rows)
        return super().execute(batch)


def test_a_row_that_fails_ends_its_own_draft_alone() -> None:
    rig = DraftRig(Broken)
    assert isinstance(rig.draft_runner, Broken)
    assert rig.model is not None
    prompt = list(b"hello")
    asked = [
        DraftRequest(name, prompt, 3, len(prompt), block_ids=[4 * n, 4 * n + 1], table_id=n + 1)
        for n, name in enumerate("ab")
    ]
    rig.draft_runner.bad = "draft-1"
    broken, whole = rig.model.drafts(asked)
    assert list(broken.token_ids) == [0]
    assert list(whole.token_ids) == expected_tokens(prompt, 3)


def test_a_guess_beyond_the_vocabulary_ends_a_draft() -> None:
    rig = DraftRig()
    assert rig.draft_runner is not None
    prompt = list(b"hello")
    tokens = expected_tokens(prompt, 7)
    above = max(tokens)
    model = DraftModel(rig.draft_runner, above, clock=rig.clock)
    (draft,) = model.drafts([DraftRequest("a", prompt, 7, len(prompt), block_ids=[0, 1, 2], table_id=1)])
    assert list(draft.token_ids) == [*tokens[: tokens.index(above)], 0]


def test_a_grammar_cuts_drafts() -> None:
    from engine.runner.structured_output import GrammarCompiler
    from splitserve.models.hf_tokenizer import load_tokenizer
    from splitserve.v1.generation_pb2 import Grammar

    plain, rig = DraftRig(None), DraftRig()
    compiler = GrammarCompiler(load_tokenizer("simulated"), rig.runner.facts)
    asked = request(prompt=b"q", grammar=compiler.compile(Grammar(regex=r"[a-z ]{5,40}\.")), max_tokens=48)
    assert rig.answers([asked]) == plain.answers([asked])
