"""The paths of the Responses API (https://platform.openai.com/docs/api-reference/responses) and their handlers.

A request becomes one of chat and is served like one; its answer is shown as items.
"""

from __future__ import annotations

import time

from pydantic_core import from_json

from coordinator.entrypoints.http.exchange import ApiPath, HttpExchange, json_bytes
from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.entrypoints.openai.app import OpenAIServing
from coordinator.entrypoints.openai.bodies import compact_json
from coordinator.entrypoints.openai.chat import ChatRequest
from coordinator.entrypoints.openai.items import serve_items
from coordinator.entrypoints.responses.answers import ResponseAnswer
from coordinator.entrypoints.responses.requests import NAMES, NOT_SERVED, InputItem, ResponsesRequest
from coordinator.entrypoints.responses.store import ResponseStore
from coordinator.request.json_bounds import check_structure
from splitserve.errors import InvalidArgumentError


class ResponsesEndpoints:
    """The endpoints of the Responses API. `chats` serves the chat requests."""

    def __init__(self, api: InferenceApi, chats: OpenAIServing) -> None:
        self._api, self._chats = api, chats
        self._store = ResponseStore()
        self.paths = [
            ApiPath(("POST",), "/v1/responses", self.create),
            ApiPath(("GET", "DELETE"), "/v1/responses/{response_id}", self.stored),
        ]

    async def create(self, exchange: HttpExchange) -> None:
        """POST /v1/responses."""
        caller = exchange.caller()
        body = await exchange.json_body()
        request = await self._chats.parsed(ResponsesRequest, body, NOT_SERVED)
        before = b"[]"
        if request.previous_response_id is not None:
            before = self._store.get(
                caller.tenant, request.previous_response_id, "previous_response_id"
            ).items
        size = len(body) + len(before)
        items, chat = await self._api.parser.run(size, continued, before, request)
        exchange.field_names = chat.names_as(NAMES, "parameters")
        choice, (parser,) = await self._chats.prepared(exchange, caller, chat, size)
        model = self._api.routes.public_name(request.model or "", caller)
        answer = await self._api.parser.run(
            size,
            lambda: ResponseAnswer(exchange.request_id, int(time.time()), model, request.shown(), parser),
        )

        async def keep() -> None:
            if request.store:
                stored = await self._api.parser.run(size + answer.size, answer.stored, items)
                self._store.add(caller.tenant, answer.response_id, stored)

        await serve_items(exchange, self._api, choice, answer, streams=request.stream, keep=keep)

    async def stored(self, exchange: HttpExchange) -> None:
        """GET and DELETE /v1/responses/{response_id}."""
        tenant, response_id = exchange.caller().tenant, exchange.path_params["response_id"]
        if exchange.method == "GET":
            await exchange.respond(200, self._store.get(tenant, response_id).whole)
            return
        self._store.delete(tenant, response_id)
        await exchange.respond(200, json_bytes({"id": response_id, "object": "response", "deleted": True}))


def continued(before: bytes, request: ResponsesRequest) -> tuple[str, ChatRequest]:
    """All items of the conversation, without the brackets of their JSON list, and the request as one of chat."""
    try:
        check_structure(before)  # many turns together may have more items than a body may have
    except InvalidArgumentError as error:
        name = "previous_response_id"
        message = f"{name}: with the items before, {error.message}"
        raise InvalidArgumentError(message, reason=error.reason, field=name) from None
    earlier = [InputItem.model_validate(item) for item in from_json(before)]
    own = [
        item.model_dump(exclude_unset=True, exclude={"summary"} if item.content else None)
        for item in request.input
    ]
    parts = [part for part in (before.decode()[1:-1], compact_json(own)[1:-1]) if part]
    return ",".join(parts), request.chat_request(earlier)
