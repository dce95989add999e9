"""Streaming parser of tool calls in an answer: `<tool_call>{"name": …, "arguments": …}</tool_call>`.

Pure: text in, parts out. Once a call's name is known, its arguments are passed on as they arrive. A whole call that is
none is passed on as text. The beginning of a call with which an answer ends is left out: it is no text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from coordinator.entrypoints.openai.tools import CALL_BEGIN, CALL_END

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
"""The start of a call with its fields in the usual order, up to the first brace of the arguments."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """The start of a call."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """A piece of a call's arguments, as written by the model."""

    index: int
    text: str


Part = TextPart | CallPart | ArgumentsPart


class ToolCallParser:
    """`feed` each piece of text, then `close`; both return the parts that have become certain."""

    def __init__(self, *, must_call: bool = False) -> None:
        """`must_call`: the answer is calls and nothing else, so that no text is passed on."""
        self.calls = 0
        """Number of calls that have started."""
        self._must_call = must_call
        self._text = ""
        self._state = self._outside
        self._value = _ObjectEnd()

    def feed(self, text: str) -> list[Part]:
        """The parts that this piece completes."""
        self._text += text
        return self._shown(self._parts())

    def close(self, *, is_cut: bool = False) -> list[Part]:
        """The parts that were held back. Call at the end of the answer. `is_cut`: the model would have gone on."""
        left, self._text = self._text, ""
        if self._state == self._in_call:
            return self._whole_call(left)
        if self._state != self._outside:
            return []
        fragment = _begun(left, CALL_BEGIN)
        if is_cut or len(fragment) > 1:  # a text may well end with "<"
            left = left.removesuffix(fragment)
            left = left.rstrip() if fragment else left
        return self._shown([TextPart(left)] if left and not (self.calls and not left.strip()) else [])

    def _shown(self, parts: Iterable[Part]) -> list[Part]:
        return [part for part in parts if not (self._must_call and isinstance(part, TextPart))]

    def _parts(self) -> Iterator[Part]:
        state = None
        while state != self._state:  # each state consumes what it can and may switch to the next
            state = self._state
            yield from state()

    def _outside(self) -> Iterator[Part]:
        before, tag, after = self._text.partition(CALL_BEGIN)
        if tag:
            self._text, self._state = after, self._in_call
            if text := before.rstrip():
                yield TextPart(text)
            return
        # White space before a call belongs to the call, and the end of the text may be the start of a tag.
        sure = len(before.removesuffix(_begun(before, CALL_BEGIN)).rstrip())
        if sure:
            self._text = before[sure:]
            yield TextPart(before[:sure])

    def _in_call(self) -> Iterator[Part]:
        head = _HEAD.match(self._text)
        if head is not None and (name := _string(head["name"])):
            self._text, self._state, self._value = self._text[head.end() :], self._in_arguments, _ObjectEnd()
            yield self._begin(name)
            return
        whole, tag, after = self._text.partition(CALL_END)
        if tag:
            self._text, self._state = after, self._outside
            yield from self._whole_call(whole) or [TextPart(CALL_BEGIN + whole + CALL_END)]

    def _in_arguments(self) -> Iterator[Part]:
        end = self._value.find(self._text)
        piece = self._text[:end]
        self._text = self._text[len(piece) :]
        if piece:
            yield ArgumentsPart(self.calls - 1, piece)
        if end is not None:
            self._state = self._after_arguments

    def _after_arguments(self) -> Iterator[Part]:
        _, tag, after = self._text.partition(CALL_END)
        if tag:
            self._text, self._state = after, self._outside
        else:
            self._text = _begun(self._text, CALL_END)
        yield from ()

    def _begin(self, name: str) -> CallPart:
        self.calls += 1
        return CallPart(self.calls - 1, f"call_{uuid.uuid4().hex[:24]}", name)

    def _whole_call(self, text: str) -> list[Part]:
        """The parts of a complete call, with its fields in any order; empty if the text is not a call."""
        try:
            call: Any = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        begun = self._begin(call["name"])
        return [begun, ArgumentsPart(begun.index, written)]


class _ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, piece: str) -> int | None:
        """Index in this piece after the end of the object; None: not yet."""
        for position, character in enumerate(piece):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        return None


def _begun(text: str, tag: str) -> str:
    """The longest suffix of the text that is a proper prefix of the tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return tag[:length]
    return ""


def _string(literal: str) -> str:
    """The value of a JSON string literal; empty if it is invalid."""
    try:
        value: str = json.loads(literal)
    except ValueError:
        return ""
    return value
