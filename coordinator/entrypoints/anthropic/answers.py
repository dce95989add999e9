"""The answer as a message, or as the events of its making."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json
from typing_extensions import override

from coordinator.entrypoints.http.exchange import ErrorResponse, json_bytes
from coordinator.entrypoints.openai.bodies import compact_json
from coordinator.entrypoints.openai.formats.answer import AnswerParser
from coordinator.entrypoints.openai.formats.arguments import quoted
from coordinator.entrypoints.openai.items import AnswerItem, ItemAnswer, event
from coordinator.request.inference_request import MESSAGE_PREFIX
from splitserve.generation.bounds import MAX_STOP_STRING_CHARACTERS
from splitserve.generation.output_delta import TokenDelta
from splitserve.models.tokenizer import Tokenizer
from splitserve.v1 import inference_pb2

ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types by status. Other statuses are "invalid_request_error" below 500 and "api_error" from 500 on."""
DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""By kind of item, the type of its deltas and their field."""
MAX_STOP_TOKENS = 4 * MAX_STOP_STRING_CHARACTERS
"""Most tokens of a stop sequence: one for each byte."""


def error_body(response: ErrorResponse) -> bytes:
    """An error in Anthropic's form."""
    unnamed = "invalid_request_error" if response.status < 500 else "api_error"
    error = {"type": ERROR_TYPES.get(response.status, unnamed), "message": response.shown["message"]}
    return json_bytes({"type": "error", "error": error})


class StopSequences:
    """Finds the stop sequence that has ended an answer: its text is left out, but its tokens are not."""

    def __init__(self, sequences: Sequence[str], tokenizer: Tokenizer, *, keep_special: bool) -> None:
        """`keep_special`: whether the answer's text has the names of special tokens."""
        self._sequences, self._tokenizer, self._keep_special = sequences, tokenizer, keep_special
        self._last: deque[int] = deque(maxlen=MAX_STOP_TOKENS)

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        self._last.extend(token_ids)

    def found(self) -> str | None:
        """The sequence that ends first in the last tokens, the longest of several; None: something else has ended the
        answer."""
        text = self._tokenizer.decode(list(self._last), keep_special=self._keep_special)
        places = [(text.find(sequence), sequence) for sequence in self._sequences if sequence in text]
        return min(places, key=lambda place: (place[0] + len(place[1]), place[0]), default=(0, None))[1]


class MessageAnswer(ItemAnswer):
    """The answer to a request of the Messages API."""

    def __init__(
        self,
        request_id: str,
        model: str,
        max_tokens: int,
        stops: StopSequences | None,
        parser: AnswerParser | None,
    ) -> None:
        """`stops`: None without stop sequences."""
        super().__init__(parser)
        self._max_tokens, self._stops = max_tokens, stops
        self._message: dict[str, Any] = {
            "id": f"{MESSAGE_PREFIX}{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    @override
    def delta(self, delta: TokenDelta) -> bytes:
        if self._stops is not None:
            self._stops.add(delta.token_ids)
        return super().delta(delta)

    @override
    def whole(self) -> bytes:
        content = [self._block(item, item.text) for item in self.items]
        return compact_json(self._message | {"content": content}).encode()

    @override
    def failed(self, response: ErrorResponse) -> bytes:
        return b"event: error\ndata: %s\n\n" % error_body(response)

    @override
    def _begin(self, prompt_tokens: int) -> str:
        message = self._message | {"usage": {"input_tokens": prompt_tokens, "output_tokens": 0}}
        return event("message_start", f'"message":{compact_json(message)}') + event("ping", "")

    @override
    def _opened(self, item: AnswerItem) -> str:
        block = compact_json(self._block(item, ""))
        return event("content_block_start", f'"index":{item.index},"content_block":{block}')

    @override
    def _grown(self, item: AnswerItem, piece: str) -> str:
        kind, name = DELTAS[item.kind]
        return _delta(item, kind, name, piece)

    @override
    def _close(self, item: AnswerItem, *, is_cut: bool) -> str:
        signed = item.kind == "reasoning"
        events = _delta(item, "signature_delta", "signature", self._message["id"]) if signed else ""
        return events + event("content_block_stop", f'"index":{item.index}')

    @override
    def _end(self, done: inference_pb2.GenerationDone, *, is_cut: bool) -> str:
        counts = done.usage
        stop = self._stops.found() if self._stops is not None and not is_cut else None
        if is_cut:
            is_limit = counts.completion_tokens >= self._max_tokens
            reason = "max_tokens" if is_limit else "model_context_window_exceeded"
        elif self._parser.calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if stop is None else "stop_sequence"
        ended = {"stop_reason": reason, "stop_sequence": stop}
        usage = {
            "input_tokens": counts.prompt_tokens - counts.cached_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached_prompt_tokens,
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._parser.reasoning_tokens or 0},
        }
        self._message |= {**ended, "usage": usage}
        fields = f'"delta":{compact_json(ended)},"usage":{compact_json(usage)}'
        return event("message_delta", fields) + event("message_stop", "")

    def _block(self, item: AnswerItem, text: str) -> dict[str, Any]:
        if item.call is not None:
            return {
                "type": "tool_use",
                "id": item.call.call_id,
                "name": item.call.name,
                "input": _object(text),
            }
        if item.kind == "text":
            return {"type": "text", "text": text}
        return {"type": "thinking", "thinking": text, "signature": self._message["id"] if text else ""}


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; what there is of them if they are cut."""
    try:
        value = from_json(text, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _delta(item: AnswerItem, kind: str, name: str, text: str) -> str:
    return event(
        "content_block_delta", f'"index":{item.index},"delta":{{"type":"{kind}","{name}":{quoted(text)}}}'
    )
