"""A streamed chat answer: `chat.completion.chunk` events of one choice."""

from __future__ import annotations

from typing import Any

from coordinator.openai.answers import FINISH_REASONS, ChunkFrame, Frame, quoted
from coordinator.openai.logprobs import TokenTexts, chat_logprobs
from coordinator.openai.tool_parser import ArgumentsPart, CallPart, Part, TextPart, ToolCallParser
from splitserve.v1 import generation_pb2, inference_pb2


class ChatChunks:
    """See ChoiceStream. `texts` when log-probabilities were asked for, `parser` when there may be calls."""

    def __init__(
        self,
        frame: Frame,
        index: int,
        *,
        has_usage: bool,
        texts: TokenTexts | None = None,
        parser: ToolCallParser | None = None,
    ) -> None:
        self._frame = ChunkFrame(frame, index, has_usage)
        self._before = f'{self._frame.before}"delta":{{"content":'
        self._after = f'}},"logprobs":null,"finish_reason":null{self._frame.after}'
        self._texts, self._parser = texts, parser
        self._is_plain = texts is None and parser is None
        self._begun = self._ended = False

    def delta(self, delta: generation_pb2.OutputDelta) -> bytes:
        """See ChoiceStream."""
        text = delta.text
        if self._is_plain:
            events = f"{self._before}{quoted(text)}{self._after}" if text else ""
        else:
            events = self._special(delta)
        if not self._begun:
            self._begun = True
            events = self._chunk({"role": "assistant", "content": ""}) + events
        if delta.finish_reason:
            events += self._end(delta.finish_reason)
        return events.encode()

    def done(self, done: inference_pb2.GenerationDone) -> bytes:
        """See ChoiceStream."""
        return b"" if self._ended else self._end(done.finish_reason).encode()

    def _special(self, delta: generation_pb2.OutputDelta) -> str:
        logprobs = None
        if self._texts is not None and delta.logprobs:
            logprobs = chat_logprobs(self._texts, delta.logprobs)
        if self._parser is None:
            shown = [{"content": delta.text}] if delta.text or logprobs else []
        else:
            shown = [_shown(part) for part in self._parser.feed(delta.text)]
            if logprobs and not shown:
                shown = [{}]
        events = ""
        for fields in shown:
            events += self._chunk(fields, logprobs)
            logprobs = None  # they stand in the first chunk of their tokens
        return events

    def _end(self, reason: int) -> str:
        self._ended = True
        events, name = "", FINISH_REASONS[reason]
        if self._parser is not None:
            events = "".join(self._chunk(_shown(part)) for part in self._parser.close())
            if self._parser.calls and name == "stop":
                name = "tool_calls"
        return events + self._chunk({}, finish_reason=name)

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> str:
        return self._frame.chunk({"delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})


def _shown(part: Part) -> dict[str, Any]:
    match part:
        case TextPart(text):
            return {"content": text}
        case CallPart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call: dict[str, Any] = {
                "index": index,
                "id": call_id,
                "type": "function",
                "function": function,
            }
        case ArgumentsPart(index, text):
            call = {"index": index, "function": {"arguments": text}}
    return {"tool_calls": [call]}
