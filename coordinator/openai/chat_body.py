"""A chat answer sent at once: one choice of `chat.completion`."""

from __future__ import annotations

from typing import Any

from coordinator.openai.answers import FINISH_REASONS
from coordinator.openai.logprobs import TokenTexts, chat_logprobs
from coordinator.openai.tool_parser import ArgumentsPart, CallPart, TextPart, ToolCallParser
from splitserve.v1 import generation_pb2, inference_pb2


class ChatBody:
    """See ChoiceBody. `texts` when log-probabilities were asked for."""

    def __init__(self, index: int, *, texts: TokenTexts | None = None, has_tools: bool = False) -> None:
        self._index, self._texts, self._has_tools = index, texts, has_tools
        self._pieces: list[str] = []
        self._logprobs: list[generation_pb2.TokenLogprob] = []

    def delta(self, delta: generation_pb2.OutputDelta) -> None:
        """See ChoiceBody."""
        self._pieces.append(delta.text)
        if self._texts is not None:
            self._logprobs.extend(delta.logprobs)

    def shown(self, done: inference_pb2.GenerationDone) -> dict[str, Any]:
        """See ChoiceBody."""
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
    """The text beside the calls, and the calls."""
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
