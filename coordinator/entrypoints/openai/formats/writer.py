"""What is found in an answer: text, reasoning, and tool calls piece by piece."""

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
    """A piece of a call's arguments, which together are JSON."""

    index: int
    text: str


Part = TextPart | ReasoningPart | CallPart | ArgumentsPart


class Writer:
    """Gathers the parts of one answer. White space around reasoning and before calls belongs to neither."""

    def __init__(self, tools: Mapping[str, Schema | None], *, must_call: bool = False) -> None:
        """`tools`: the schema of each function's parameters. `must_call`: no text is passed on."""
        self.tools = tools
        self.calls = 0
        """Number of calls that have started."""
        self.parts: list[Part] = []
        self._must_call = must_call
        self._held: list[str] = []
        """White space that belongs to the text only if more of it follows."""
        self._is_fresh = False
        """Whether white space that comes next is dropped."""
        self._has_text = False
        self._ids: set[str] = set()
        self._name = ""
        self._arguments = 0

    def text(self, piece: str) -> None:
        """Appends text."""
        if not self._must_call:
            found = self._sure(piece)
            self._has_text = self._has_text or bool(found)
            self.parts += [TextPart(sure) for sure in found]

    def reasoning(self, piece: str) -> None:
        """Appends reasoning."""
        self.parts += [ReasoningPart(sure) for sure in self._sure(piece)]

    def trim(self) -> None:
        """Says that reasoning begins or has ended here."""
        self._held.clear()
        self._is_fresh = True

    def end(self, *, is_whole: bool) -> None:
        """Says that nothing follows. `is_whole`: white space at the end is the text's own."""
        left = "".join(self._held)
        if left and is_whole and not (self._is_fresh or self.calls or self._must_call):
            self.parts.append(TextPart(left))

    def call(self, name: str, call_id: str = "") -> None:
        """Begins a call. `call_id`: the model's own, which counts if it is the first of its kind."""
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
        """Appends one argument, given as text; the schema says what it is unless `is_json` does."""
        schema = None if is_json else self.tools.get(self._name)
        written = quoted(text) if is_json is False else typed(text, schema, name)
        self.arguments(f"{', ' if self._arguments else '{'}{quoted(name)}: {written}")
        self._arguments += 1

    def end_arguments(self) -> None:
        """Says that the call has no more of the arguments that were given one by one."""
        self.arguments("}" if self._arguments else "{}")

    def _sure(self, piece: str) -> list[str]:
        """What of the text so far has something after it, in one piece."""
        if self._is_fresh:
            piece = piece.lstrip()
        body = piece.rstrip()
        if not body:
            self._held += [piece] if piece else []
            return []
        self._is_fresh = False
        sure = "".join([*self._held, body])
        self._held = [piece[len(body) :]]
        return [sure]
