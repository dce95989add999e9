"""Finds reasoning and tool calls in a growing answer."""

from __future__ import annotations

from coordinator.entrypoints.openai.formats.reader import EndOfText, Reader, Steps
from coordinator.entrypoints.openai.formats.tool_format import ReasoningFormat, ToolFormat
from coordinator.entrypoints.openai.formats.writer import Part, ReasoningPart, Writer


class AnswerParser:
    """`feed` each piece of text, then `close`; both return the parts that have become certain.

    What does not parse as a call is text. An answer that ends in the middle of a call has what came of the call, and
    nothing of its format as text.
    """

    def __init__(
        self,
        writer: Writer,
        tool_format: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        is_reasoning: bool = False,
    ) -> None:
        """`is_reasoning`: the prompt has begun the reasoning."""
        self.reasoning_tokens = 0
        """Tokens of the reasoning so far."""
        self.has_reasoning = reasoning is not None
        self._writer, self._reader = writer, Reader()
        self._tool_format, self._reasoning = tool_format, reasoning
        self._is_reasoning = is_reasoning
        self._steps = self._read()
        self._advance()

    @property
    def calls(self) -> int:
        """Number of calls that have started."""
        return self._writer.calls

    def feed(self, text: str, tokens: int = 0) -> list[Part]:
        """The parts that this piece of so many tokens completes."""
        was_reasoning = self._is_reasoning
        self._reader.add(text)
        self._advance()
        parts = self._taken()
        if was_reasoning or self._is_reasoning or any(isinstance(part, ReasoningPart) for part in parts):
            self.reasoning_tokens += tokens
        return parts

    def close(self, *, is_cut: bool = False) -> list[Part]:
        """The parts that were held back. Call at the end of the answer. `is_cut`: the model would have gone on."""
        self._reader.end(is_cut=is_cut)
        self._advance()
        self._writer.end(is_whole=not self._reader.lost)
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._writer.parts = self._writer.parts, []
        return parts

    def _advance(self) -> None:
        next(self._steps, None)

    def _read(self) -> Steps[None]:
        reader, writer, tool_format = self._reader, self._writer, self._tool_format
        try:
            if self._reasoning is not None:
                yield from self._read_reasoning(self._reasoning)
            if tool_format is not None and tool_format.is_bare:
                yield from self._read_call(tool_format, "")
            if tool_format is None:
                yield from reader.rest(writer.text)
                return
            while True:
                tag = yield from reader.until(tool_format.tags, writer.text)
                if tag in tool_format.opens:
                    yield from self._read_call(tool_format, tag)
        except EndOfText:
            return

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Steps[None]:
        reader, writer = self._reader, self._writer
        reader.record()
        begun = yield from reader.takes(reasoning.begin)
        kept = reader.recorded()
        if not begun and not self._is_reasoning:
            writer.text(kept)
            return
        self._is_reasoning = True
        writer.trim()
        try:
            yield from reader.until(reasoning.ends, writer.reasoning)
        finally:
            writer.trim()
        self._is_reasoning = False

    def _read_call(self, tool_format: ToolFormat, tag: str) -> Steps[None]:
        """Reads calls, or nothing if there are none."""
        reader, calls = self._reader, self.calls
        reader.record(tag)
        try:
            is_call = yield from tool_format.read(reader, self._writer)
        except EndOfText:
            # What might have become a call without a tag is any text.
            if not tag and not reader.is_cut and self.calls == calls:
                self._writer.text(reader.recorded())
            raise
        taken = reader.recorded()
        if not is_call and self.calls == calls:
            self._writer.text(taken)
