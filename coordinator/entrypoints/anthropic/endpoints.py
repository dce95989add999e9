"""The paths of the Messages API (https://docs.anthropic.com/en/api/messages) and their handlers.

A request becomes one of chat and is served like one; its answer is shown as blocks of content.
"""

from __future__ import annotations

from coordinator.entrypoints.anthropic.answers import MessageAnswer, StopSequences, error_body
from coordinator.entrypoints.anthropic.requests import NAMES, NOT_SERVED, MessagesRequest, PromptFields
from coordinator.entrypoints.http.exchange import ApiPath, HttpExchange, json_bytes
from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.entrypoints.openai.app import OpenAIServing
from coordinator.entrypoints.openai.items import serve_items


class MessagesEndpoints:
    """The endpoints of the Messages API. `chats` serves the chat requests."""

    def __init__(self, api: InferenceApi, chats: OpenAIServing) -> None:
        self._api, self._chats = api, chats
        self.paths = [
            ApiPath(("POST",), "/v1/messages", self.create, error_body),
            ApiPath(("POST",), "/v1/messages/count_tokens", self.count_tokens, error_body),
        ]

    async def create(self, exchange: HttpExchange) -> None:
        """POST /v1/messages."""
        caller = exchange.caller()
        body = await exchange.json_body()
        request = await self._chats.parsed(MessagesRequest, body, NOT_SERVED)
        chat = await self._api.parser.run(len(body), request.chat_request)
        exchange.field_names = chat.names_as(NAMES, "input_schema")
        choice, (parser,) = await self._chats.prepared(exchange, caller, chat, len(body))
        stop, stops = choice.requests[0].stop, None
        stop.fit_max_tokens = True
        if stop.stop_strings:
            tokenizer = await self._api.tokenizer(request.model or "", caller)
            stops = StopSequences(stop.stop_strings, tokenizer, keep_special=stop.keep_special_tokens)
        model = self._api.routes.public_name(request.model or "", caller)
        answer = MessageAnswer(exchange.request_id, model, request.max_tokens, stops, parser)
        await serve_items(exchange, self._api, choice, answer, streams=request.stream)

    async def count_tokens(self, exchange: HttpExchange) -> None:
        """POST /v1/messages/count_tokens."""
        caller = exchange.caller()
        body = await exchange.json_body()
        request = await self._chats.parsed(PromptFields, body, NOT_SERVED)
        chat = await self._api.parser.run(len(body), request.chat_request)
        exchange.field_names = chat.names_as(NAMES, "input_schema")
        (prompt,) = await self._api.parser.run(len(body), chat.generate_requests)
        async with exchange.while_connected():
            tokens, _, _ = await self._api.tokenize(prompt, caller, add_special_tokens=True)
            await exchange.respond(200, json_bytes({"input_tokens": len(tokens)}))
