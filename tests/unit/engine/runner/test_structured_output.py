"""Structured output on the simulated engine: masks, ends, failures, preemption and resume."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.core.engine import EngineRequest, FinishReason
from engine.core.model_runner import ModelFacts, RowsFailedError
from engine.runner.simulated_runner import EOS_TOKEN_ID, VOCABULARY_SIZE
from engine.runner.structured_output import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarFailedError,
    allowed_tokens,
    masks_of,
)
from splitserve.errors import InvalidArgumentError
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.v1.generation_pb2 import Grammar, SamplingParams
from tests.support.engine.engine_rig import PROMPT, Rig, hand_over, request, stopping
from tests.support.engine.grammars import TestCompiler
from tests.support.engine.grammars import asked as asked_of

FACTS = ModelFacts(1000, VOCABULARY_SIZE, frozenset({EOS_TOKEN_ID}))
COMPILER = TestCompiler(load_tokenizer("simulated"), FACTS)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", autouse=True)
def compiler() -> Iterator[TestCompiler]:
    yield COMPILER
    COMPILER.close()


def regex(text: str) -> CompiledGrammar:
    return COMPILER.compile(Grammar(regex=text))


def asked(name: str, grammar: CompiledGrammar, **stop: Any) -> EngineRequest:
    limits = {"max_tokens": 120, **stop}
    return request(name, PROMPT + name.encode(), grammar=grammar, stop=stopping(**limits))


def run(*requests: EngineRequest, **options: Any) -> Rig:
    rig = Rig(**options)
    for each in requests:
        rig.core.add_request(each)
    while rig.core.has_work():
        rig.step()
    return rig


def mask_of(text: str, after: bytes = b"") -> set[int]:
    sequence = scheduled(asked_of(regex(text), after), after)
    (mask,) = masks_of([sequence]).values()
    return set(np.flatnonzero(allowed_tokens(mask, VOCABULARY_SIZE, ())).tolist())


def scheduled(matcher: Any, after: bytes = b"") -> Any:
    from engine.core.model_runner import SamplingParams as EngineSampling
    from engine.core.model_runner import ScheduledSequence

    tokens = [*PROMPT, *after]
    return ScheduledSequence(
        "r", tokens, len(PROMPT), len(tokens) - 1, 1, [0], True, EngineSampling(), frozenset(), matcher
    )


def test_the_end_is_allowed_exactly_where_the_grammar_is_complete() -> None:
    assert mask_of("ab?") == {ord("a")}
    assert mask_of("ab?", b"a") == {ord("b"), EOS_TOKEN_ID}
    assert mask_of("ab?", b"ab") == {EOS_TOKEN_ID}


def test_banned_tokens_yield_where_nothing_else_is_left() -> None:
    mask = np.zeros(9, dtype=np.int32)
    mask[0] = 0b110
    assert np.flatnonzero(allowed_tokens(mask, 257, {1})).tolist() == [2]
    assert np.flatnonzero(allowed_tokens(mask, 257, {1, 2})).tolist() == [1, 2]
    assert allowed_tokens(mask, 300, ()).size == 300


def test_an_answer_of_a_schema() -> None:
    grammar = COMPILER.compile(Grammar(json_schema=json.dumps(SCHEMA)))
    rig = run(*(asked(f"r{n}", grammar, max_tokens=400) for n in range(8)), max_running_requests=4)
    texts = set()
    for output in rig.outputs.values():
        assert output.finish_reason is FinishReason.STOP
        answer = json.loads(output.text)
        assert answer["kind"] in ("cat", "dog")
        assert 0 <= answer["legs"] <= 99
        texts.add(output.text)
    assert len(texts) > 1


def test_an_answer_that_cannot_continue_ends_with_its_last_token() -> None:
    output = run(asked("r", regex("abc"), max_tokens=3)).outputs["r"]
    assert (output.text, output.finish_reason) == ("abc", FinishReason.STOP)
    assert bytes(output.token_ids) == b"abc"


def test_max_tokens_cuts() -> None:
    output = run(asked("r", regex("a{50}"), max_tokens=7)).outputs["r"]
    assert (output.text, output.finish_reason) == ("a" * 7, FinishReason.LENGTH)


def test_min_tokens_and_ignore_eos_defer_the_end_as_long_as_anything_can_follow() -> None:
    grammar = regex("a{1,20}")
    for stop in ({"min_tokens": 20}, {"ignore_eos": True}, {"min_tokens": 60, "ignore_eos": True}):
        output = run(asked("r", grammar, **stop)).outputs["r"]
        assert (output.text, output.finish_reason) == ("a" * 20, FinishReason.STOP), stop
    cut = run(asked("r", regex("a*"), ignore_eos=True, max_tokens=9)).outputs["r"]
    assert (cut.text, cut.finish_reason) == ("a" * 9, FinishReason.LENGTH)
    empty = run(asked("r", COMPILER.compile(Grammar(lark='start: ""')), min_tokens=5)).outputs["r"]
    assert (empty.text, empty.token_ids, empty.finish_reason) == ("", [EOS_TOKEN_ID], FinishReason.STOP)


def test_stop_strings_and_stop_tokens_end_inside_the_grammar() -> None:
    output = run(asked("r", regex("abcdef"), stop_strings=("cd",))).outputs["r"]
    assert (output.text, output.finish_reason) == ("ab", FinishReason.STOP)
    output = run(asked("r", regex("abcdef"), stop_token_ids=frozenset({ord("d")}))).outputs["r"]
    assert (output.text, output.finish_reason) == ("abc", FinishReason.STOP)
    output = run(asked("r", regex("abcdef"), stop_token_ids=frozenset({ord("d")}), min_tokens=5)).outputs["r"]
    assert output.text == "abcdef"  # the grammar allows nothing else in its place


def test_rows_without_a_grammar_are_unaffected() -> None:
    free = replace(request("free", PROMPT), stop=stopping(max_tokens=12))
    alone = run(free).outputs["free"]
    crowd = run(free, asked("r", regex("x{30}")), asked("s", regex("[0-9]{30}")))
    assert crowd.outputs["free"] == alone
    assert crowd.outputs["r"].text == "x" * 30
    assert crowd.outputs["s"].text.isdecimal()


def test_preempted_answers_continue_within_their_grammar() -> None:
    grammar = regex("[ab]{60}!")
    roomy = run(*(asked(f"r{n}", grammar) for n in range(4)), num_blocks=200)
    tight = run(*(asked(f"r{n}", grammar) for n in range(4)), num_blocks=30)
    assert tight.outputs == roomy.outputs
    assert all(output.text.endswith("!") for output in tight.outputs.values())


def test_a_handed_over_and_a_resumed_answer_are_the_same() -> None:
    grammar = regex("[a-z]{10},[0-9]{10}")
    whole = run(asked("r", grammar)).outputs["r"]
    for prior in (0, 1, 12, 19):
        after = [*PROMPT, *b"r", *whole.token_ids[:prior]]
        again = replace(asked("r", grammar), token_ids=tuple(after), prior_output_tokens=prior)
        prefill, decode = Rig(), Rig()
        token = hand_over(prefill, decode, again)
        assert token == whole.token_ids[prior]
        decode.core.admit(1, token)
        decode.core.release_writer(1)
        while decode.core.has_work():
            decode.step()
        assert decode.outputs["r"].token_ids == whole.token_ids[prior + 1 :]
        assert decode.outputs["r"].finish_reason is FinishReason.STOP


LETTERS = tuple(range(ord("a"), ord("k")))


@pytest.mark.parametrize("grammar", [None, "[a-d]{40}"])
def test_allowed_tokens_and_bad_words_in_any_part_of_an_answer(grammar: str | None) -> None:
    allowed = replace(request().sampling, allowed_token_ids=LETTERS)
    asks = asked("r", regex(grammar), max_tokens=40) if grammar else request("r", max_tokens=40)
    free = run(replace(asks, sampling=allowed)).outputs["r"].token_ids
    assert set(free) <= set(LETTERS)
    # Each pair of the free answer is a bad word, one token is, and one word begins in the prompt.
    bad = (*itertools.pairwise(free), (free[0],), (PROMPT[-1], free[1]))[-60:]
    sampling = replace(allowed, bad_sequences=tuple(map(tuple, bad)))
    whole = run(replace(asks, sampling=sampling)).outputs["r"].token_ids
    assert len(whole) == 40
    assert not {tuple(pair) for pair in itertools.pairwise(whole)} & set(bad)
    assert free[0] not in whole
    for prior in (0, 1, 12):
        tokens = (*asks.token_ids, *whole[:prior])
        again = replace(asks, sampling=sampling, token_ids=tokens, prior_output_tokens=prior)
        prefill, decode = Rig(), Rig()
        token = hand_over(prefill, decode, again)
        assert token == whole[prior]
        decode.core.admit(1, token)
        decode.core.release_writer(1)
        assert decode.run()["r"].token_ids == whole[prior + 1 :]


def test_a_request_that_rules_out_all_tokens_fails_alone() -> None:
    nothing = replace(request().sampling, allowed_token_ids=(97,), bad_sequences=((97,),))
    rig = run(replace(request("w"), sampling=nothing), request("r"))
    failure = rig.outputs["w"].failure
    assert failure is not None
    assert failure[0] == "GRAMMAR_FAILED"
    assert "allowed_token_ids" in failure[1]
    assert rig.outputs["r"].finish_reason is FinishReason.LENGTH


def test_output_outside_the_grammar_fails_that_request_alone() -> None:
    wrong = replace(asked("w", regex("abc")), token_ids=(*PROMPT, *b"xx"), prior_output_tokens=2)
    rig = run(wrong, asked("r", regex("abc")))
    assert rig.outputs["r"].text == "abc"
    failure = rig.outputs["w"].failure
    assert failure is not None
    assert failure[0] == "GRAMMAR_FAILED"
    assert rig.core.load().referenced_blocks == 0

    decode = Rig()
    decode.core.reserve(asked("d", regex("abc")), 7)
    decode.core.admit(7, ord("x"))
    decode.step()
    failure = decode.outputs["d"].failure
    assert failure is not None
    assert failure[0] == "GRAMMAR_FAILED"
    assert "grammar" in failure[1]
    assert not decode.core.abort("d")


def test_a_mask_that_costs_too_much_fails_its_row() -> None:
    fine, stuck = asked_of(regex("ab")), asked_of(regex("ab"), b"z")
    with pytest.raises(GrammarFailedError) as caught:
        masks_of([scheduled(fine), scheduled(stuck), scheduled(asked_of(regex("ab")))])
    assert caught.value.rows == (1,)


async def test_compiled_grammars_are_kept() -> None:
    compiler = COMPILER.compiler
    sampling = SamplingParams(grammar=Grammar(regex="abc"))
    assert await compiler.compiled(sampling) is await compiler.compiled(sampling)
    assert await compiler.compiled(SamplingParams()) is None


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(regex=r"[^\s\S]"),
        Grammar(
            lark="start: A\nA: " + " & ".join(f"/.*{chr(97 + n % 26)}.{{{n % 7 + 2}}}.*/" for n in range(60))
        ),
    ],
)
async def test_what_no_token_can_begin_or_costs_too_much_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await COMPILER.compiler.compiled(SamplingParams(grammar=grammar))
    assert caught.value.reason == "GRAMMAR_REFUSED"


async def test_a_tokenizer_that_cannot_be_read_is_refused_by_name() -> None:
    from tests.support.engine.byte_tokenizer import ByteTokenizer

    compiler = GrammarCompiler(ByteTokenizer(), FACTS)
    with pytest.raises(InvalidArgumentError, match="tokenizer") as caught:
        await compiler.compiled(SamplingParams(grammar=Grammar(regex="a")))
    assert caught.value.reason == "GRAMMAR_NOT_SUPPORTED"


def test_deep_definitions_work() -> None:
    links = "\n".join(f'A{n}: ("x" | ("y" A{n + 1}))' for n in range(4000))
    compiled = COMPILER.compile(Grammar(lark=f'start: A0\n{links}\nA4000: "z"'))
    output = run(asked("r", compiled)).outputs["r"]
    assert output.text.strip("y") in ("x", "")


class Scripted:
    """A grammar that allows everything and answers when it is told to; as its own matcher it serves one sequence."""

    eos_token_ids: frozenset[int] = frozenset()
    complete, error = False, ""
    mask = np.full(-(-VOCABULARY_SIZE // 32), -1, dtype=np.int32)

    def __init__(self, fails: bool = False) -> None:
        self.answered, self.fails, self.closed = True, fails, False

    def matcher(self) -> Scripted:
        return self

    def advance(self, token_ids: object) -> None:
        pass

    def wait(self, timeout_s: float = 0.0) -> bool:
        if self.fails:
            raise RuntimeError("a bug in a library")
        return self.answered

    def close(self) -> None:
        self.closed = True


def test_a_mask_that_cannot_be_made_fails_its_row_alone() -> None:
    batch = [scheduled(Scripted(fails)) for fails in (False, True, False)]
    with pytest.raises(RowsFailedError, match="incident") as failed:
        masks_of(batch)
    assert (failed.value.rows, failed.value.reason) == ((1,), "INTERNAL")
    assert sorted(masks_of([batch[0], batch[2]])) == [0, 1]


def test_a_row_whose_mask_is_not_ready_sits_out_and_the_others_go_on() -> None:
    slow = Scripted()
    rig = Rig()
    rig.core.add_request(replace(request("slow", PROMPT), stop=stopping(max_tokens=9), grammar=slow))
    rig.core.add_request(replace(request("free", PROMPT), stop=stopping(max_tokens=12)))
    for _ in range(4):
        rig.step()
    slow.answered = False
    before = len(rig.outputs["slow"].token_ids)
    while rig.outputs["free"].finish_reason is None:
        rig.step()
    assert len(rig.outputs["free"].token_ids) == 12
    assert len(rig.outputs["slow"].token_ids) <= before + 1
    assert rig.core.has_work()
    assert not slow.closed
    slow.answered = True
    while rig.core.has_work():
        rig.step()
    assert len(rig.outputs["slow"].token_ids) == 9
    assert slow.closed


def test_what_waits_for_its_grammar_can_be_aborted_and_expires() -> None:
    for ends in ("abort", "deadline"):
        slow, rig = Scripted(), Rig()
        made = replace(request("slow", PROMPT), stop=stopping(max_tokens=9), grammar=slow)
        rig.core.add_request(replace(made, deadline_s=rig.clock.now + 5) if ends == "deadline" else made)
        while not rig.outputs or not rig.outputs["slow"].token_ids:
            rig.step()
        slow.answered = False
        rig.step()
        if ends == "abort":
            assert rig.core.abort("slow")
        else:
            rig.clock.now += 10
            rig.step()
            assert rig.outputs["slow"].failure is not None
        assert slow.closed
        assert not rig.core.has_work()
        assert rig.core.load().referenced_blocks == 0


def test_a_step_that_leaves_no_rows_out_waits_for_a_bounded_time() -> None:
    slow = Scripted()
    slow.answered = False
    with pytest.raises(GrammarFailedError, match="too much time") as failed:
        masks_of([scheduled(Scripted()), scheduled(slow)], wait_s=0.01)
    assert failed.value.rows == (1,)


def test_a_process_that_ends_fails_the_output_that_it_was_at_and_the_others_go_on() -> None:
    grammar = COMPILER.compile(Grammar(regex="[a-z]{3}!"))
    first, second = asked_of(grammar, b"ab"), asked_of(grammar, b"xyz")
    ended = grammar._connection
    ended.channel.shutdown(socket.SHUT_RDWR)  # as if the process ended by what comes next
    first.advance(b"c")
    second.advance(b"!")
    assert first.wait()
    assert "too much time or memory" in first.error
    assert second.wait()
    assert (second.complete, second.error) == (True, "")
    assert grammar._connection is not ended
    third = asked_of(grammar, b"abc")
    assert np.flatnonzero(allowed_tokens(third.mask, VOCABULARY_SIZE, ())).tolist() == [ord("!")]
