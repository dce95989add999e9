"""A step begins before the previous one's outputs are detokenized and sent; only the timing changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.engine import EngineRequest, FinishReason, StepResult
from engine.core.engine_core import EngineCore
from engine.core.model_runner import (
    Logprob,
    ModelFacts,
    PendingStep,
    RowsFailedError,
    SampledToken,
    ScheduledSequence,
)
from engine.runner.simulated_runner import EOS_TOKEN_ID, VOCABULARY_SIZE
from engine.runner.structured_output import CompiledGrammar
from engine.scheduling.waiting_queue import Precedence
from splitserve.errors import InvalidArgumentError, UnavailableError
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.v1.generation_pb2 import Grammar
from tests.support.engine.byte_tokenizer import ByteTokenizer
from tests.support.engine.engine_rig import PROMPT, Clock, Rig, Script, expected_text, request, stopping
from tests.support.engine.grammars import TestCompiler
from tests.support.engine.simulated_tokens import expected_tokens

FACTS = ModelFacts(1000, VOCABULARY_SIZE, frozenset({EOS_TOKEN_ID}))
COMPILER = TestCompiler(load_tokenizer("simulated"), FACTS)
REGEXES = ("(ab|cd)+e", "[a-e]{3}", "é*a")


@cache
def grammar_of(regex: str) -> CompiledGrammar:
    return COMPILER.compile(Grammar(regex=regex))


@pytest.fixture(scope="module", autouse=True)
def compiler() -> Iterator[TestCompiler]:
    yield COMPILER
    COMPILER.close()


SAID = "aé日🎈b\nc".encode()


class Babble(Script):
    """Emits characters of one to four bytes, one byte per token, and sometimes the end."""

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        sampled = zip(batch, super().execute(batch), strict=True)
        return [self._said(each, token.token_id) if token is not None else None for each, token in sampled]

    def _said(self, each: ScheduledSequence, token: int) -> SampledToken:
        if each.matcher is None:
            ends = token % 17 == 0 and EOS_TOKEN_ID not in each.banned_token_ids
            token = EOS_TOKEN_ID if ends else SAID[len(each.token_ids) % len(SAID)]
        if each.sampling.logprobs is None:
            return SampledToken(token)
        return SampledToken(token, Logprob(token, -token / 256, ((token, -token / 256),)))


def babbling(pick: random.Random, number: int) -> EngineRequest:
    """A request that ends in any of the ways there are."""
    prompt = [pick.randrange(256) for _ in range(pick.randrange(1, 20))]
    prior = list(SAID[: pick.choice([0, 0, 2, 4])])
    stop = stopping(
        max_tokens=pick.randrange(5, 25),
        stop_strings=pick.choice([(), (), ("\n",), ("日", "éa"), ("b\nca",)]),
        stop_token_ids=pick.choice([frozenset(), frozenset({ord("c")})]),
        min_tokens=pick.choice([0, 0, 6]),
        ignore_eos=pick.random() < 0.3,
    )
    made = request(
        f"r{number}",
        [*prompt, *prior],
        prior_output_tokens=len(prior),
        stop=stop,
        precedence=Precedence(pick.randrange(2), pick.randrange(2), pick.randrange(3)),
        prefill_only=pick.random() < 0.1,
        deadline_s=100.0 + pick.choice([5, 15, *[10**6] * 6]),
    )
    sampling = replace(made.sampling, logprobs=pick.choice([None, 1]))
    grammar = grammar_of(pick.choice(REGEXES)) if not prior and pick.random() < 0.3 else None
    return replace(made, sampling=sampling, grammar=grammar)


def transcript(seed: int, overlaps: bool) -> tuple[object, ...]:
    """All outputs of an engine whose pool is too small, in order."""
    pick = random.Random(seed)
    blocks, budget = pick.choice([12, 16, 40]), pick.choice([4, 32])
    rig = Rig(kind=Babble, overlaps=overlaps, num_blocks=blocks, max_step_tokens=budget)
    requests = [babbling(pick, number) for number in range(12)]
    prefills = {each.request_id for each in requests if each.prefill_only}
    for each in requests:
        rig.core.add_request(each)
        for _ in range(pick.randrange(4)):
            rig.step()
            rig.clock.now += 1
    rig.run()
    while rig.core.load().waiting_requests + rig.core.load().referenced_blocks:
        for name in prefills & rig.outputs.keys():
            rig.core.release_held(name)
        rig.run()
    rig.assert_clean()
    outputs = [output for result in rig.results for output in result.outputs]
    progress = [progress for result in rig.results for progress in result.progress]
    # Outputs of rows with a grammar may come in a result of their own.
    started = [result.started for result in rig.results if result.started]
    return outputs, progress, started, rig.outputs


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_outputs_in_the_same_order(seed: int) -> None:
    assert transcript(seed, overlaps=True) == transcript(seed, overlaps=False)


def test_outputs_wait_for_the_next_step_and_no_longer() -> None:
    rig = Rig(overlaps=True)
    rig.core.add_request(request(max_tokens=3))
    delivered: list[int] = []
    rig.between_halves = lambda: delivered.append(len(rig.results))
    rig.step()
    assert not rig.results, "the second step is still to come"
    rig.step()
    assert [output.token_ids for output in rig.results[0].outputs] == [expected_tokens(PROMPT, 1)]
    rig.step()
    assert len(rig.results) == 3, "nothing follows the last step"
    assert delivered == [0, 0, 1]
    assert rig.outputs["r"].text == expected_text(PROMPT, 3)


def test_kv_goes_out_at_once() -> None:
    rig = Rig(overlaps=True, max_step_tokens=8)
    rig.core.add_request(request(prefill_only=True))
    for steps in (1, 2, 3):
        rig.step()
        assert len(rig.results) == steps


class CountingTokenizer(ByteTokenizer):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.decoded += 1
        return super().decode(token_ids)


@pytest.mark.parametrize("stop_strings", [(), ("no such text",)])
def test_only_texts_that_can_end_their_answers_are_written_before_the_next_step(
    stop_strings: tuple[str, ...],
) -> None:
    rig, tokenizer = Rig(overlaps=True), CountingTokenizer()
    core = EngineCore(rig.runner, rig.config, tokenizer)
    core.add_request(request(stop=stopping(stop_strings=stop_strings)))
    for _ in range(3):
        core.begin_step()
        core.take_result()
        before = tokenizer.decoded
        core.finish_step()
        assert (tokenizer.decoded > before) == bool(stop_strings)


@pytest.mark.parametrize("when", ["before the next step", "during the next step"])
@pytest.mark.parametrize("prefill_only", [False, True])
def test_a_request_has_no_output_after_its_abort(when: str, prefill_only: bool) -> None:
    rig = Rig(overlaps=True)
    rig.core.add_request(request("stays", b"abc"))
    rig.step()
    rig.core.add_request(request("goes", prefill_only=prefill_only, prompt=PROMPT * 3))
    rig.step()
    if when == "before the next step":
        assert rig.core.abort("goes")
        rig.step()
    else:
        rig.between_halves = lambda: rig.core.abort("goes") and None
        rig.step()
        rig.between_halves = lambda: None
    assert not rig.core.abort("goes")
    rig.core.release_held("goes")
    assert rig.run()["stays"].token_ids == expected_tokens(b"abc", 12)
    assert all(output.request_id == "stays" for result in rig.results for output in result.outputs)
    rig.assert_clean()


def test_an_end_that_was_not_delivered_yet_can_be_aborted() -> None:
    rig = Rig(overlaps=True)
    rig.core.add_request(request("ends", max_tokens=2))
    rig.core.add_request(request("stays"))
    rig.step()
    rig.step()
    with pytest.raises(InvalidArgumentError, match="in progress"):
        rig.core.add_request(request("ends"))
    assert rig.core.abort("ends")
    assert not rig.core.abort("ends")
    del rig.outputs["ends"]
    rig.core.add_request(request("ends", b"another", max_tokens=1))
    outputs = rig.run()
    assert outputs["stays"].text == expected_text(PROMPT, 12)
    # The first request's first token had been delivered, and all of the second's.
    delivered = [output for result in rig.results for output in result.outputs if output.request_id == "ends"]
    assert [output.finish_reason for output in delivered] == [None, FinishReason.LENGTH]
    rig.assert_clean()


def test_a_deadline_comes_after_the_outputs_before_it() -> None:
    rig = Rig(overlaps=True)
    rig.core.add_request(request(deadline_s=105.0))
    rig.step()
    rig.step()
    rig.clock.now = 105.0
    output = rig.run()["r"]
    assert output.token_ids == expected_tokens(PROMPT, 2)
    assert output.text == expected_text(PROMPT, 2)
    assert output.failure is not None
    rig.assert_clean()


def test_a_deadline_that_passed_as_a_step_began_can_still_be_aborted() -> None:
    rig = Rig(overlaps=True)
    rig.core.add_request(request("late", deadline_s=105.0))
    rig.core.add_request(request("stays"))
    rig.step()
    rig.clock.now = 105.0
    rig.between_halves = lambda: rig.core.abort("late")
    rig.step()
    rig.between_halves = lambda: None
    assert rig.run()["stays"].text == expected_text(PROMPT, 12)
    assert "late" not in rig.outputs
    rig.assert_clean()


def test_blocks_freed_during_a_step_are_not_reused_until_it_is_over() -> None:
    rig = Rig(overlaps=True)
    rig.core.add_request(request())
    rig.core.begin_step()
    assert rig.core.abort("r")
    for call in (lambda: rig.core.add_request(request("new")), lambda: rig.core.reserve(request("new"), 1)):
        with pytest.raises(AssertionError, match="under way"):
            call()
    rig.core.finish_step()
    assert rig.core.take_result() == replace(StepResult(), started={"r": 0}, scheduled_tokens=len(PROMPT))
    assert rig.core.reserve(request("new"), 1) is not None


def test_a_step_counts_from_the_end_of_the_one_before() -> None:
    rig = Rig(overlaps=True, kind=Slow)
    assert isinstance(rig.runner, Slow)
    rig.runner.clock = rig.clock
    prompt = (PROMPT * 4)[:64]  # a rate rests on so many prompt tokens at least: two steps
    rig.core.add_request(request(prompt=prompt))

    def deliver() -> None:
        rig.clock.now += 0.5

    rig.between_halves = deliver
    rig.run()
    assert [result.duration_s for result in rig.results] == [1.0] * 13
    decode, prefill = (rig.core.step_totals[kind].durations for kind in ("decode", "prefill"))
    assert (decode.total, decode.sum_s) == (11, pytest.approx(11.0))
    assert (prefill.total, prefill.sum_s) == (2, pytest.approx(2.0))


class Slow(Script):
    """Takes a second for a step, whatever the host does meanwhile."""

    clock: Clock

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        self.ends_s = self.clock.now + 1.0
        return super().begin(batch)

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        self.clock.now = max(self.clock.now, self.ends_s)
        return super().execute(batch)


class Failing(Script):
    """Fails some rows of a step, or all when it begins."""

    rows: tuple[int, ...] = ()
    at_once = False

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        if self.at_once and self.error is not None:
            raise self.error
        return super().begin(batch)

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        if self.rows:
            rows, self.rows = self.rows, ()
            raise RowsFailedError("broken rows", rows)
        return super().execute(batch)


@pytest.mark.parametrize("aborted", [False, True])
def test_rows_that_fail_fail_alone_unless_aborted(aborted: bool) -> None:
    rig = Rig(kind=Failing, overlaps=True)
    assert isinstance(rig.runner, Failing)
    for name in ("bad", "good"):
        rig.core.add_request(request(name))
    rig.step()
    rig.runner.rows = (0,)
    if aborted:
        rig.between_halves = lambda: rig.core.abort("bad") and None
    rig.step()
    outputs = rig.run()
    assert outputs["good"].text == expected_text(PROMPT, 12)
    if aborted:
        assert "bad" not in outputs
    else:
        assert outputs["bad"].text == expected_text(PROMPT, 1)
        assert outputs["bad"].failure == ("ROWS_FAILED", "broken rows")
    rig.assert_clean()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_step_that_fails_fails_its_requests(at_once: bool) -> None:
    rig = Rig(kind=Failing, overlaps=True)
    assert isinstance(rig.runner, Failing)
    rig.core.add_request(request())
    rig.step()
    rig.runner.error, rig.runner.at_once = UnavailableError("no device", reason="DEVICE_LOST"), at_once
    output = rig.run()["r"]
    assert output.text == expected_text(PROMPT, 1)
    assert output.failure == ("DEVICE_LOST", "no device")
    rig.assert_clean()
