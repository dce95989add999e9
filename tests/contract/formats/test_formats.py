"""Every format of tool calls and of reasoning, however its text is cut."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.entrypoints.openai.formats.table import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormat,
    format_named,
)
from coordinator.entrypoints.openai.formats.tool_format import KEY, KIND, NAME, NUMBER, ReasoningFormat
from coordinator.entrypoints.openai.formats.writer import ArgumentsPart, CallPart
from splitserve.config.coordinator import ReasoningFormatName, ToolFormatName
from tests.support.formats.samples import CALLS, SAMPLES, Found, cut_by_chance, read

FAMILIES = sorted(SAMPLES)
THINK = REASONING_FORMATS["think"]
HERMES = AnswerFormat(TOOL_FORMATS["hermes"])
MARKS = re.compile(r"<\W*[a-zA-Z]{2,}|\[[A-Z_]+|｜\w*|\|>|\{\"name|arg_|parameter|invoke|functools")  # noqa: RUF001


def chunkings(text: str) -> Iterator[list[str]]:
    """The whole text, its characters, pieces as tokens are, and pieces of random lengths."""
    yield [text]
    yield list(text)
    yield re.findall(r"<[^<>]*>|\w+|\s+|.", text, re.DOTALL)
    yield from (cut_by_chance(text, seed, 9) for seed in range(6))


def read_anyhow(answer: AnswerFormat, text: str, *, is_cut: bool = False) -> Found:
    """The answer, which is the same for every chunking."""
    first, *others = [read(answer, pieces, is_cut=is_cut) for pieces in chunkings(text)]
    assert all(found == first for found in others)
    return first


def values_of(found: Found) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in found.calls]


def test_each_format_has_a_sample_and_a_name_in_the_settings() -> None:
    assert SAMPLES.keys() | {"harmony"} == TOOL_FORMATS.keys()  # which is read by tokens: test_harmony.py
    assert set(get_args(ToolFormatName)) == {"auto", "none", *TOOL_FORMATS}
    assert set(get_args(ReasoningFormatName)) == {"auto", "none", *REASONING_FORMATS}


@pytest.mark.parametrize("name", FAMILIES)
def test_calls(name: str) -> None:
    answer, text = AnswerFormat(TOOL_FORMATS[name]), SAMPLES[name].calls
    found = read_anyhow(answer, text)
    assert (values_of(found), found.text) == (CALLS, "")
    found = read_anyhow(answer, f"{text}\n")
    assert (values_of(found), found.text) == (CALLS, "")


HERMES_CALLS = [
    ("  spaces stay  ", "  spaces stay  ", []),
    ("a < b <tool_cal and <tool_calls>", "a < b <tool_cal and <tool_calls>", []),
    (
        '<tool_call>{"name":"f","arguments":{"s":"} </tool_call> \\" {","l":[{}]}}</tool_call>',
        "",
        [("f", '{"s":"} </tool_call> \\" {","l":[{}]}')],
    ),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", []),
    ('<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
    ('<tool_call>{"name": "f", "argu', "", []),
    ("Hello <tool_", "Hello", []),
    ('<tool_call>{"name": "f", "arguments": {"a": "cut o', "", [("f", '{"a": "cut o')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
]


@pytest.mark.parametrize(("text", "said", "calls"), HERMES_CALLS)
def test_what_models_make_of_hermes(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert read_anyhow(HERMES, text) == Found(said, calls=calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON, st.booleans(), st.data())
def test_arguments_come_out_as_they_are(value: object, is_ascii: bool, data: st.DataObject) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=is_ascii)
    text = f'Hm. <tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    cut = data.draw(st.integers(0, len(text)))
    assert read(HERMES, [text[:cut], text[cut:]]) == Found("Hm.", calls=[("f", arguments)])


def test_arguments_leave_as_they_come() -> None:
    parser = HERMES.parser({}, must_call=False)
    (begun,) = parser.feed('<tool_call>{"name": "f", "arguments": ')[:1] or parser.feed("{")[:1]
    assert isinstance(begun, CallPart)
    for piece in ('"a"', ": [1", "]}"):
        assert parser.feed(piece) == [ArgumentsPart(0, piece)]
    assert parser.feed("}\n</tool_call>\n\n") == parser.close() == []


@pytest.mark.parametrize("name", [name for name in FAMILIES if not TOOL_FORMATS[name].is_bare])
def test_calls_after_text(name: str) -> None:
    found = read_anyhow(AnswerFormat(TOOL_FORMATS[name]), f" Let me < see.\n\n{SAMPLES[name].calls}")
    assert (values_of(found), found.text) == (CALLS, " Let me < see.")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("reasoning", REASONING_FORMATS.values(), ids=lambda one: one and one.name)
@pytest.mark.parametrize("is_reasoning", [True, False])
def test_calls_after_reasoning(name: str, reasoning: ReasoningFormat, is_reasoning: bool) -> None:
    answer = AnswerFormat(TOOL_FORMATS[name], reasoning, is_reasoning=is_reasoning)
    thought = f"A thought <about>\nit, {{}} and [].\n{reasoning.ends[0]}\n\n"
    text = f"{'' if is_reasoning else reasoning.begin}\n{thought}{SAMPLES[name].calls}"
    found = read_anyhow(answer, text)
    assert (found.reasoning, values_of(found), found.text) == ("A thought <about>\nit, {} and [].", CALLS, "")


@pytest.mark.parametrize("name", [*FAMILIES, None])
@pytest.mark.parametrize("reasoning", [*REASONING_FORMATS.values(), None], ids=lambda one: one and one.name)
def test_plain_text_stays_as_it_is(name: str | None, reasoning: ReasoningFormat | None) -> None:
    answer = AnswerFormat(TOOL_FORMATS[name] if name else None, reasoning)
    for text in ("", "Hello", "Hello.\n\n", '{"a": 1} is a dict', "[1, 2]", "a <b> [c] {d", "so that a <"):
        assert read_anyhow(answer, text) == Found(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_is_cut_anywhere_leaks_nothing(name: str) -> None:
    answer = AnswerFormat(TOOL_FORMATS[name], THINK)
    whole = f"<think>\nHm.\n</think>\n\n{SAMPLES[name].calls}"
    for length in range(1, len(whole)):
        found = read(answer, [whole[:length]], is_cut=True)
        assert found == read(answer, list(whole[:length]), is_cut=True)
        assert found.text == ""
        assert "Hm.".startswith(found.reasoning)
        for (called, arguments), (expected, values) in zip(found.calls, CALLS, strict=False):
            assert called == expected
            assert not arguments or MARKS.search(arguments) is None
            if arguments.endswith("}"):
                assert json.loads(arguments) == values


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_calls_alone_has_no_text(name: str) -> None:
    answer = AnswerFormat(TOOL_FORMATS[name], THINK)
    for text in (
        "<",
        "Hello",
        SAMPLES[name].calls,
        f"{SAMPLES[name].calls}\nHello",
        SAMPLES[name].calls[:30],
    ):
        assert read(answer, list(text), must_call=True).text == ""


ALPHABET = st.sampled_from(
    [*'<tol_ca/>{}[]()"\\ ,:=\n', *(tag for one in TOOL_FORMATS.values() for tag in one.tags)]
    + [piece for sample in SAMPLES.values() for piece in re.findall(r"<[^<>]*>|\w+|[^\w\s]+", sample.calls)]
    + [THINK.begin, *THINK.ends]
)


@given(st.sampled_from(FAMILIES), st.lists(ALPHABET, max_size=25), st.booleans())
def test_any_text_is_read_the_same_however_it_is_cut(name: str, pieces: list[str], is_cut: bool) -> None:
    answer, text = AnswerFormat(TOOL_FORMATS[name], THINK), "".join(pieces)
    first, *others = [read(answer, cut, is_cut=is_cut) for cut in (pieces, [text], list(text))]
    assert all(found == first for found in others)


@pytest.mark.parametrize("name", FAMILIES)
def test_reading_takes_time_linear_in_the_length(name: str) -> None:
    """Texts that begin what never ends, and that repeat what begins something, character by character and at once."""
    answer, calls = AnswerFormat(TOOL_FORMATS[name], THINK), SAMPLES[name].calls
    marks = [match.end() for match in re.finditer(r"[\w>]", calls)]
    for end in marks[:: 1 + len(marks) // 4]:
        for filling in (" ", "<", calls[:end][-12:], "\\", '[{"a": ', ",a b"):
            for size, cut in ((500, list), (20_000, lambda text: [text])):
                for _ in range(3):  # garbage of other tests may be collected while one is measured
                    times = []
                    for length in (size, 8 * size):
                        text = calls[:end] + (filling * length)[:length] + calls[end:]
                        pieces = cut(text)
                        started = time.process_time()
                        read(answer, pieces)
                        times.append(time.process_time() - started)
                    if times[1] < 0.1 or times[1] < 30 * times[0]:
                        break
                # Eight times the length. By the square it would take sixty-four times as long.
                assert times[1] < 0.1 or times[1] < 30 * times[0], (calls[:end], filling, times)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_a_template_with_the_familys_marks_chooses_it(name: str) -> None:
    """A template writes calls as the family's models do."""
    form = TOOL_FORMATS[name].form
    spelled = form.begin + form.head + form.tail + form.end + "".join(form.argument or ()) if form else ""
    for sign in (NAME, KEY, KIND, NUMBER):
        spelled = spelled.replace(sign, "{{ x }}")
    template = f"{{% if tools %}}{' '.join(TOOL_FORMATS[name].markers)} {spelled}{{% endif %}}"
    chosen = format_named("auto", "auto", with_tools=True, template=template)
    assert chosen.tools is TOOL_FORMATS[name]
    assert format_named("auto", "auto", with_tools=False, template=template).tools is None
    assert format_named("none", "none", with_tools=True, template=template) == AnswerFormat()
    assert format_named(name, "auto", with_tools=True).tools is TOOL_FORMATS[name]
