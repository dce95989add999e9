"""The answer as a response object, or as the events of its making."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from coordinator.entrypoints.http.exchange import ErrorResponse
from coordinator.entrypoints.openai.bodies import compact_json
from coordinator.entrypoints.openai.formats.answer import AnswerParser
from coordinator.entrypoints.openai.formats.arguments import quoted
from coordinator.entrypoints.openai.items import AnswerItem, ItemAnswer, event
from coordinator.entrypoints.responses.store import StoredResponse
from coordinator.request.inference_request import RESPONSE_PREFIX
from splitserve.v1 import inference_pb2

ID_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
PARTS = {"text": "output_text", "reasoning": "reasoning_text"}
"""Types of the parts of items; also the names of their events."""
ERROR_CODES: Mapping[int, str] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Codes of failed responses by HTTP status. Other statuses are "server_error"."""


class ResponseAnswer(ItemAnswer):
    """The answer to a request of the Responses API."""

    def __init__(
        self, request_id: str, created: int, model: str, shown: dict[str, Any], parser: AnswerParser | None
    ) -> None:
        """`created`: seconds since 1970. `shown`: fields of the request that the response repeats."""
        self.response_id = f"{RESPONSE_PREFIX}{request_id}"
        head = {"id": self.response_id, "object": "response", "created_at": created, "model": model}
        self._head = compact_json({**head, **shown})[:-1]
        super().__init__(parser, len(self._head))
        self._request_id = request_id
        self._sequence = 0
        self._output: list[str] = []
        """The items that have ended, as JSON."""
        self._whole = ""

    def stored(self, before: str) -> StoredResponse:
        """The response with the items `before` it, which are JSON with commas between them. Call it after `end`."""
        items = ",".join([before, *self._output] if before else self._output)
        return StoredResponse(self.whole(), f"[{items}]".encode())

    @override
    def whole(self) -> bytes:
        return self._whole.encode()

    @override
    def failed(self, response: ErrorResponse) -> bytes:
        error = {name: response.shown[name] for name in ("code", "message", "param")}
        shown = {"code": ERROR_CODES.get(response.status, "server_error"), "message": error["message"]}
        whole = self._response("failed", error=shown)
        events = self._event("error", compact_json(error)[1:-1])
        return (events + self._event("response.failed", f'"response":{whole}')).encode()

    @override
    def _begin(self, prompt_tokens: int) -> str:
        response = f'"response":{self._response("in_progress")}'
        return self._event("response.created", response) + self._event("response.in_progress", response)

    @override
    def _opened(self, item: AnswerItem) -> str:
        shown = compact_json(self._shown(item, "in_progress"))
        events = self._event("response.output_item.added", f'"output_index":{item.index},"item":{shown}')
        if item.kind != "call":
            events += self._part("response.content_part.added", item, f'"part":{compact_json(_part(item))}')
        return events

    @override
    def _grown(self, item: AnswerItem, piece: str) -> str:
        if item.kind == "call":
            return self._place("response.function_call_arguments.delta", item, f'"delta":{quoted(piece)}')
        logprobs = ',"logprobs":[]' if item.kind == "text" else ""
        return self._part(f"response.{PARTS[item.kind]}.delta", item, f'"delta":{quoted(piece)}{logprobs}')

    @override
    def _close(self, item: AnswerItem, *, is_cut: bool) -> str:
        text = quoted(item.text)
        if item.kind == "call":
            events = self._place("response.function_call_arguments.done", item, f'"arguments":{text}')
        else:
            logprobs = ',"logprobs":[]' if item.kind == "text" else ""
            events = self._part(f"response.{PARTS[item.kind]}.done", item, f'"text":{text}{logprobs}')
            events += self._part("response.content_part.done", item, f'"part":{compact_json(_part(item))}')
        shown = compact_json(self._shown(item, "incomplete" if is_cut else "completed"))
        self._output.append(shown)
        return events + self._event(
            "response.output_item.done", f'"output_index":{item.index},"item":{shown}'
        )

    @override
    def _end(self, done: inference_pb2.GenerationDone, *, is_cut: bool) -> str:
        status = "incomplete" if is_cut else "completed"
        counts = done.usage
        usage = {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_prompt_tokens, "cache_write_tokens": 0},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens or 0},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }
        details = {"reason": "max_output_tokens"} if is_cut else None
        self._whole = self._response(status, usage=usage, incomplete_details=details)
        return self._event(f"response.{status}", f'"response":{self._whole}')

    def _response(self, status: str, **fields: Any) -> str:
        known = {"status": status, "error": None, "incomplete_details": None, "usage": None} | fields
        return f'{self._head},{compact_json(known)[1:-1]},"output":[{",".join(self._output)}]}}'

    def _shown(self, item: AnswerItem, status: str) -> dict[str, Any]:
        shown: dict[str, Any] = {"id": self._item_id(item), "status": status}
        if item.call is not None:
            call = {"call_id": item.call.call_id, "name": item.call.name, "arguments": item.text}
            return {"type": "function_call", **shown, **call}
        content = [] if status == "in_progress" else [_part(item)]
        if item.kind == "reasoning":
            return {"type": "reasoning", **shown, "summary": [], "content": content}
        return {"type": "message", "role": "assistant", **shown, "content": content}

    def _item_id(self, item: AnswerItem) -> str:
        return f"{ID_PREFIXES[item.kind]}_{self._request_id}_{item.index}"

    def _part(self, name: str, item: AnswerItem, fields: str) -> str:
        return self._place(name, item, f'"content_index":0,{fields}')

    def _place(self, name: str, item: AnswerItem, fields: str) -> str:
        return self._event(name, f'"item_id":"{self._item_id(item)}","output_index":{item.index},{fields}')

    def _event(self, name: str, fields: str) -> str:
        number, self._sequence = self._sequence, self._sequence + 1
        return event(name, f'"sequence_number":{number},{fields}')


def _part(item: AnswerItem) -> dict[str, Any]:
    part: dict[str, Any] = {"type": PARTS[item.kind], "text": item.text}
    return part | ({"annotations": [], "logprobs": []} if item.kind == "text" else {})
