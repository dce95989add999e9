"""gpt-oss's format, whose answers are read by their tokens, however these are cut."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench.output_formats import GptOssTokens, gpt_oss_encoding
from coordinator.entrypoints.openai.call_grammar import answer_grammar
from coordinator.entrypoints.openai.formats import harmony
from coordinator.entrypoints.openai.formats.harmony import FINAL, HARMONY, HARMONY_REASONING
from coordinator.entrypoints.openai.formats.table import AnswerFormat
from coordinator.entrypoints.openai.formats.writer import ArgumentsPart, CallPart, ReasoningPart, TextPart
from coordinator.entrypoints.openai.tools import Function, ResponseFormat
from splitserve.errors import InvalidArgumentError, UnavailableError
from tests.support.formats.samples import CALLS, TOOLS, Found

THOUGHT = "<|channel|>analysis<|message|>Hm.\nYes.<|end|><|start|>assistant"
LET_ME = "<|channel|>commentary<|message|>Let me see ☔.<|end|><|start|>assistant"
ARGUMENTS = json.dumps(CALLS[0][1], ensure_ascii=False)
IN_CHANNEL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
IN_ROLE = f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
NOW = "<|start|>assistant to=functions.now<|channel|>commentary json<|message|><|call|>"


@pytest.fixture(scope="module")
def answer() -> AnswerFormat:
    return AnswerFormat(HARMONY, HARMONY_REASONING, harmony=gpt_oss_encoding())


def tokens_of(text: str) -> list[int]:
    return list(gpt_oss_encoding().encode(text, allowed_special="all"))


def read(
    answer: AnswerFormat, pieces: Sequence[Sequence[int]], text: str | None = None, **how: Any
) -> tuple[Found, int | None]:
    """The answer and its count of reasoning tokens. `text`: that of all tokens, or less of it, as a stop string leaves
    it. It arrives as it is decoded, so the bytes of a character that is not complete yet are none."""
    is_cut = how.pop("is_cut", False)
    parser, found, decoded, sent = (
        answer.parser(TOOLS, must_call=how.get("must_call", False)),
        Found(),
        b"",
        0,
    )
    whole = (
        gpt_oss_encoding().decode([token for piece in pieces for token in piece]) if text is None else text
    )
    parts = []
    for piece in pieces:
        decoded += b"".join(bytes_of(token) for token in piece)
        known = len(decoded.decode(errors="ignore"))
        parts += parser.feed(whole[sent:known], piece)
        sent = known
    for part in [*parts, *parser.close(is_cut=is_cut)]:
        match part:
            case TextPart(more):
                found.text += more
            case ReasoningPart(more):
                found.reasoning += more
            case CallPart(index, _, name):
                assert index == len(found.calls)
                found.calls.append((name, ""))
            case ArgumentsPart(index, more):
                found.calls[index] = found.calls[index][0], found.calls[index][1] + more
    return found, parser.reasoning_tokens


def bytes_of(token: int) -> bytes:
    tokens = VOCABULARY.tokens
    return tokens[token] if token < len(tokens) else gpt_oss_encoding().decode([token]).encode()


VOCABULARY = GptOssTokens()


def chunkings(tokens: list[int]) -> Iterator[list[list[int]]]:
    yield [tokens]
    yield [[token] for token in tokens]
    for seed in range(5):
        drawn, pieces, start = random.Random(seed), [], 0
        while start < len(tokens):
            end = start + drawn.randint(1, 9)
            pieces.append(tokens[start:end])
            start = end
        yield pieces


def read_anyhow(answer: AnswerFormat, text: str, **how: Any) -> tuple[Found, int | None]:
    every = [read(answer, pieces, **how) for pieces in chunkings(tokens_of(text))]
    assert all(found == every[0] for found in every)
    return every[0]


@pytest.mark.parametrize("call", [IN_CHANNEL, IN_ROLE])
def test_calls_after_reasoning_and_text(answer: AnswerFormat, call: str) -> None:
    found, counted = read_anyhow(answer, THOUGHT + LET_ME + call + NOW)
    assert (found.reasoning, found.text) == ("Hm.\nYes.", "Let me see ☔.")
    assert found.calls == [("get_weather", ARGUMENTS), ("now", "{}")]
    assert counted == len(tokens_of(THOUGHT.removesuffix("<|start|>assistant")))
    found, _ = read_anyhow(answer, THOUGHT + LET_ME + call, must_call=True)
    assert (found.text, found.calls) == ("", [("get_weather", ARGUMENTS)])


def test_messages_of_other_kinds(answer: AnswerFormat) -> None:
    assert read_anyhow(answer, f"{FINAL}Hi <b> <|x|>.\n\n<|return|>")[0].text == "Hi <b> <|x|>.\n\n"
    found, _ = read_anyhow(
        answer, f"{THOUGHT}<|channel|>analysis<|message|>No.<|end|><|start|>assistant{FINAL}A"
    )
    assert (found.reasoning, found.text) == ("Hm.\nYes.\nNo.", "A")
    for left_out in (
        "<|channel|>commentary to=python code<|message|>print()<|end|><|start|>assistant",
        "<|channel|>??<|end|><|start|>assistant",
    ):
        found, _ = read_anyhow(answer, f"{left_out}{FINAL}A<|return|>")
        assert (found.text, found.reasoning, found.calls) == ("A", "", [])


def test_what_an_answer_has_not_is_text(answer: AnswerFormat) -> None:
    plain = replace(answer, tools=None, reasoning=None)
    found, counted = read_anyhow(plain, f"{THOUGHT}{FINAL}A<|return|>")
    assert (found.text, found.reasoning, counted) == ("Hm.\nYes.\nA", "", None)
    assert read_anyhow(plain, IN_ROLE)[0].text == ARGUMENTS


def test_an_answer_that_is_continued(answer: AnswerFormat) -> None:
    found, _ = read_anyhow(answer.continuing("The text"), " goes on.<|return|>")
    assert found.text == " goes on."


def test_an_answer_that_is_cut_anywhere_leaks_nothing(answer: AnswerFormat) -> None:
    tokens = tokens_of(THOUGHT + LET_ME + IN_CHANNEL)
    for length in range(1, len(tokens)):
        found, _ = read(answer, [tokens[:length]], is_cut=True)
        assert found == read(answer, [[token] for token in tokens[:length]], is_cut=True)[0]
        assert "Hm.\nYes.".startswith(found.reasoning)
        assert "Let me see ☔.".startswith(found.text)
        assert all(ARGUMENTS.startswith(arguments) for _, arguments in found.calls)


def test_a_stop_string_ends_the_text_before_it(answer: AnswerFormat) -> None:
    tokens = tokens_of(f"{FINAL}Hello STOP it")
    for released in ("", "Hel", "Hello "):
        for pieces in ([tokens], [[token] for token in tokens]):
            assert read(answer, pieces, text=FINAL + released)[0].text == released


def test_any_tokens_are_read_the_same_however_they_are_cut(answer: AnswerFormat) -> None:
    pool = tokens_of(THOUGHT + LET_ME + IN_CHANNEL + NOW + "<|constrain|><|return|>")
    for seed in range(300):
        drawn = random.Random(seed)
        tokens = [drawn.choice(pool) for _ in range(drawn.randint(1, 30))]
        whole = read(answer, [tokens], is_cut=True)
        assert read(answer, [[token] for token in tokens], is_cut=True) == whole


def test_reading_takes_time_linear_in_the_length(answer: AnswerFormat) -> None:
    for text in (f"{FINAL}", "<|channel|>", THOUGHT + IN_CHANNEL.removesuffix("<|call|>"), "<|end|>"):
        times = []
        for length in (500, 4000):
            tokens = tokens_of(text) + tokens_of(" word") * length
            started = time.process_time()
            read(answer, [[token] for token in tokens])
            times.append(time.process_time() - started)
        assert times[1] < 0.5 or times[1] < 30 * times[0], (text, times)


def test_the_grammar_writes_what_is_read(answer: AnswerFormat) -> None:
    functions = [Function(name="get_weather", parameters=TOOLS["get_weather"])]
    forced = answer_grammar(answer, functions, must_call=True)
    assert forced is not None
    assert '"<|channel|>commentary to=functions." call more' in forced.lark
    assert '"get_weather <|constrain|>json<|message|>" arguments_0' in forced.lark
    form = ResponseFormat(type="json_object").form
    made = answer_grammar(answer, form=form)
    assert made is not None
    assert 'start: thinking "<|channel|>final<|message|>" response_format' in made.lark


def test_a_vocabulary_of_another_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    class Other(GptOssTokens):
        def token_bytes(self, token_id: int) -> bytes:
            return b"x%d" % token_id

    monkeypatch.setenv("SPLITSERVE_HOME", str(tmp_path))
    monkeypatch.delenv(harmony.FOLDER, raising=False)
    monkeypatch.setattr(harmony, "_encoding", harmony._encoding.__wrapped__)
    with pytest.raises(InvalidArgumentError, match="cannot load gpt-oss's vocabulary"):
        harmony.encoding_of(Other())  # type: ignore[arg-type]
    assert not list((tmp_path / "harmony").iterdir())


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openai_harmony", None)
    monkeypatch.setattr(harmony, "_encoding", harmony._encoding.__wrapped__)
    monkeypatch.setenv(harmony.FOLDER, "anywhere")
    with pytest.raises(UnavailableError, match=r"splitserve\[harmony\]"):
        harmony.encoding_of(VOCABULARY)  # type: ignore[arg-type]
