"""Finds reasoning and tool calls in a growing answer."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.entrypoints.openai.formats.reader import EndOfText, Reader, Steps
from coordinator.entrypoints.openai.formats.tool_format import ReasoningFormat, ToolFormat
from coordinator.entrypoints.openai.formats.writer import Part, Writer


class AnswerParser:
    """Call `feed` with each piece of an answer, then `close`. Both return parts that no later text can change.

    Text that does not parse as a call stays text. If an answer ends within a call, the arguments so far are passed on,
    and no tag appears as text.
    """

    def __init__(
        self,
        writer: Writer,
        tool_format: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        is_reasoning: bool = False,
        end_ids: Sequence[int] = (),
    ) -> None:
        """`is_reasoning`: the prompt has begun the reasoning. `end_ids`: the tokens of the tag that ends it."""
        self._tokens = _ReasoningTokens(end_ids)
        self._writer, self._reader = writer, Reader()
        self._tool_format, self._reasoning = tool_format, reasoning
        self._is_reasoning = self._has_begun = is_reasoning
        self._steps = self._read()
        self._advance()

    @property
    def calls(self) -> int:
        """Number of calls that have started."""
        return self._writer.calls

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far, with its tags; None: the model's format has no reasoning."""
        return self._tokens.count if self._reasoning is not None else None

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Part]:
        """The parts that this piece completes. `token_ids`: the tokens that the piece was decoded from."""
        self._reader.add(text)
        self._advance()
        if self._reasoning is not None:
            self._tokens.add(token_ids, has_begun=self._has_begun, has_ended=not self._is_reasoning)
        return self._taken()

    def close(self, *, is_cut: bool = False) -> list[Part]:
        """The parts that were held back, at the end of the answer. `is_cut`: the model would have gone on."""
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
                yield from reader.to_the_end(writer.text)
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
        text = reader.recorded()
        if not begun and not self._is_reasoning:
            writer.text(text)
            return
        self._is_reasoning = self._has_begun = True
        writer.trim()
        try:
            yield from reader.until(reasoning.ends, writer.reasoning)
        finally:
            writer.trim()
        self._is_reasoning = False

    def _read_call(self, tool_format: ToolFormat, tag: str) -> Steps[None]:
        """Reads the calls after the opening tag `tag`; empty: a call without a tag. Text that is no call stays text."""
        reader, calls = self._reader, self.calls
        reader.record(tag)
        try:
            is_call = yield from tool_format.read(reader, self._writer)
        except EndOfText:
            # Without a tag, text that has not become a call is an ordinary answer.
            if not tag and not reader.is_cut and self.calls == calls:
                self._writer.text(reader.recorded())
            raise
        text = reader.recorded()
        if not is_call and self.calls == calls:
            self._writer.text(text)


class _ReasoningTokens:
    """Counts the tokens of the reasoning. The text shows whether the reasoning has ended, the tokens of the closing tag
    show where: the count does not depend on how many tokens arrive together."""

    def __init__(self, end_ids: Sequence[int]) -> None:
        self.count = 0
        self._end_ids = list(end_ids)
        self._last: list[int] = []
        self._seen = self._end = 0
        self._is_over = False

    def add(self, token_ids: Sequence[int], *, has_begun: bool, has_ended: bool) -> None:
        """Takes the next tokens of the answer."""
        if self._is_over:
            return
        for token_id in token_ids:
            self._seen += 1
            self._last = [*self._last, token_id][-len(self._end_ids) :] if self._end_ids else []
            if not self._end and self._last and self._last == self._end_ids:
                self._end = self._seen
        if has_begun:
            self.count = self._end if has_ended and self._end else self._seen
            self._is_over = has_ended
