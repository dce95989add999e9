"""The parts of an answer: text, reasoning, and tool calls piece by piece."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.entrypoints.openai.formats.arguments import Schema, quoted, typed


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text outside of reasoning and calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """The start of a call."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """A piece of a call's arguments. All pieces of a call together are JSON."""

    index: int
    text: str


Part = TextPart | ReasoningPart | CallPart | ArgumentsPart


class Writer:
    """Gathers the parts of one answer. White space around reasoning and before calls belongs to neither."""

    def __init__(self, tools: Mapping[str, Schema | None], *, must_call: bool = False) -> None:
        """`tools`: the schema of the parameters, by function. `must_call`: text is dropped."""
        self.tools = tools
        self.calls = 0
        """Number of calls that have started."""
        self.parts: list[Part] = []
        self._must_call = must_call
        self._held: list[str] = []
        """White space that belongs to the text only if more of it follows."""
        self._is_fresh = False
        """Whether white space is dropped if it comes next."""
        self._has_text = False
        self._ids: set[str] = set()
        self._name = ""
        self._arguments = 0

    def text(self, piece: str) -> None:
        """Appends text."""
        if not self._must_call and (text := self._before_blanks(piece)):
            self._has_text = True
            self.parts.append(TextPart(text))

    def reasoning(self, piece: str) -> None:
        """Appends reasoning."""
        if text := self._before_blanks(piece):
            self.parts.append(ReasoningPart(text))

    def trim(self) -> None:
        """Drops the white space around this place: reasoning begins or ends here."""
        self._held.clear()
        self._is_fresh = True

    def end(self, *, is_whole: bool) -> None:
        """Ends the answer. `is_whole`: white space at the end belongs to the text."""
        blanks = "".join(self._held)
        if blanks and is_whole and not (self._is_fresh or self.calls or self._must_call):
            self.parts.append(TextPart(blanks))

    def call(self, name: str, call_id: str = "") -> None:
        """Begins a call. `call_id`: the id that the model wrote; a missing or repeated one is replaced."""
        self._is_fresh = not self._has_text
        self._name, self._arguments = name, 0
        if not call_id or call_id in self._ids:
            call_id = f"call_{uuid.uuid4().hex[:24]}"
        self._ids.add(call_id)
        self.parts.append(CallPart(self.calls, call_id, name))
        self.calls += 1

    def arguments(self, piece: str) -> None:
        """Appends JSON to the arguments of the call."""
        if piece:
            self.parts.append(ArgumentsPart(self.calls - 1, piece))

    def argument(self, name: str, text: str, *, is_json: bool | None = None) -> None:
        """Appends one argument. `is_json`: whether `text` is JSON or a string; None: the schema decides."""
        schema = None if is_json else self.tools.get(self._name)
        written = quoted(text) if is_json is False else typed(text, schema, name)
        self.arguments(f"{', ' if self._arguments else '{'}{quoted(name)}: {written}")
        self._arguments += 1

    def end_arguments(self) -> None:
        """Closes the object of the arguments that `argument` has appended."""
        self.arguments("}" if self._arguments else "{}")

    def _before_blanks(self, piece: str) -> str:
        """The text so far up to its last white space, which is held back; empty if there is nothing else."""
        if self._is_fresh:
            piece = piece.lstrip()
        body = piece.rstrip()
        if not body:
            self._held.append(piece)
            return ""
        self._is_fresh = False
        text = "".join([*self._held, body])
        self._held = [piece[len(body) :]]
        return text
