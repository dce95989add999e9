"""Responses to chat requests: the events of a streamed choice, and the choice of a whole response."""

from __future__ import annotations

from typing import Any

from coordinator.entrypoints.openai.logprobs import TokenTexts, chat_logprobs
from coordinator.entrypoints.openai.response import FINISH_REASONS, ChunkFrame, Frame, quoted
from coordinator.entrypoints.openai.tool_parser import ArgumentsPart, CallPart, Part, TextPart, ToolCallParser
from splitserve.v1 import generation_pb2, inference_pb2

_BEGIN = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
"""The choice of a stream's first chunk."""


class ChatStream:
    """See ChoiceStream. `texts` is given if logprobs were requested, `parser` if there may be tool calls."""

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
            events = f"{self._frame.before}{_BEGIN}{self._frame.after}{events}"
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
            logprobs = None  # only in the first chunk of these tokens
        return events

    def _end(self, reason: int) -> str:
        self._ended = True
        events, name = "", FINISH_REASONS[reason]
        if self._parser is not None:
            events = "".join(self._chunk(_shown(part)) for part in self._parser.close())
            if self._parser.calls and name == "stop":
                name = "tool_calls"
        end = f'"delta":{{}},"logprobs":null,"finish_reason":"{name}"'
        return f"{events}{self._frame.before}{end}{self._frame.after}"

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> str:
        return self._frame.chunk({"delta": delta, "logprobs": logprobs, "finish_reason": None})


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


class ChatResponse:
    """See ChoiceBuilder. `texts` is given if logprobs were requested."""

    def __init__(self, index: int, *, texts: TokenTexts | None = None, has_tools: bool = False) -> None:
        self._index, self._texts, self._has_tools = index, texts, has_tools
        self._pieces: list[str] = []
        self._logprobs: list[generation_pb2.TokenLogprob] = []

    def delta(self, delta: generation_pb2.OutputDelta) -> None:
        """See ChoiceBuilder."""
        self._pieces.append(delta.text)
        if self._texts is not None:
            self._logprobs.extend(delta.logprobs)

    def to_json(self, done: inference_pb2.GenerationDone) -> dict[str, Any]:
        """See ChoiceBuilder."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._pieces), "refusal": None}
        finish_reason = FINISH_REASONS[done.finish_reason]
        if self._has_tools:
            content, calls = _split(message["content"])
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
                finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        return {
            "index": self._index,
            "message": message,
            "logprobs": chat_logprobs(self._texts, self._logprobs) if self._texts else None,
            "finish_reason": finish_reason,
        }


def _split(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text outside of tool calls, and the calls."""
    parser, content = ToolCallParser(), ""
    calls: list[dict[str, Any]] = []
    for part in [*parser.feed(text), *parser.close()]:
        match part:
            case TextPart(piece):
                content += piece
            case CallPart(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case ArgumentsPart(index, piece):
                calls[index]["function"]["arguments"] += piece
    return content, calls
