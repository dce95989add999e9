"""`/tokenize` and `/detokenize`, as vLLM serves them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from coordinator.entrypoints.http.exchange import ApiPath, FieldNames, HttpExchange
from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.entrypoints.openai.app import OpenAIServing
from coordinator.entrypoints.openai.bodies import Fields, UInt32, dumped
from coordinator.entrypoints.openai.chat import CHAT_NAMES, Message, TemplateFields
from coordinator.entrypoints.openai.tools import Tool
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import inference_pb2

ENTRY_BYTES = 16
"""About the size of a token in a response."""


class TokenizeRequest(TemplateFields):
    """The body of `/tokenize`: a prompt, or a conversation with what its template reads."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt; a chat template writes them itself."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_prompt_or_conversation(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidArgumentError("one of prompt and messages must be given", field="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidArgumentError("add_special_tokens needs a prompt", field="add_special_tokens")
        of_conversations = {"tools", *TemplateFields.model_fields} & self.model_fields_set
        if self.prompt is not None and of_conversations:
            name = min(of_conversations)
            raise InvalidArgumentError(f"{name} needs messages", field=name)
        return self

    def generate_request(self) -> inference_pb2.GenerateRequest:
        """A request with this prompt."""
        if self.messages is None:
            return inference_pb2.GenerateRequest(model=self.model or "", text=self.prompt or "")
        chat = self.conversation(self.messages, self.tools or ())
        return inference_pb2.GenerateRequest(model=self.model or "", chat=chat)


class DetokenizeRequest(Fields):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[UInt32], Field(fail_fast=True)]


class TokenizationEndpoints:
    """Both paths. They take turns with the prompts of generations, and count as running while they last. `chats` parses
    the bodies."""

    def __init__(self, api: InferenceApi, chats: OpenAIServing) -> None:
        self._api, self._chats = api, chats
        self.paths = [
            ApiPath(("POST",), "/tokenize", self.tokenize),
            ApiPath(("POST",), "/detokenize", self.detokenize),
        ]

    async def tokenize(self, exchange: HttpExchange) -> None:
        """POST /tokenize."""
        caller, body = exchange.caller(), await exchange.json_body()
        request, run = await self._chats.parsed(TokenizeRequest, body, {}), self._api.parser.run
        exchange.field_names = FieldNames({**CHAT_NAMES, "prompt.text": "prompt"})
        asked = await run(len(body), request.generate_request)
        async with exchange.while_connected():
            tokens, model, tokenizer = await self._api.tokenize(
                asked, caller, add_special_tokens=request.add_special_tokens is not False
            )

            def shown() -> bytes:
                strings = [tokenizer.entry(token) for token in tokens] if request.return_token_strs else None
                answer = {"count": len(tokens), "max_model_len": model.context_tokens}
                return dumped({**answer, "tokens": list(tokens), "token_strs": strings}).encode()

            await exchange.respond(200, await run(len(tokens) * ENTRY_BYTES, shown))

    async def detokenize(self, exchange: HttpExchange) -> None:
        """POST /detokenize."""
        caller, body = exchange.caller(), await exchange.json_body()
        request, run = await self._chats.parsed(DetokenizeRequest, body, {}), self._api.parser.run
        async with exchange.while_connected():
            text = await self._api.detokenize(request.model or "", request.tokens, caller)
            await exchange.respond(200, await run(len(text), lambda: dumped({"prompt": text}).encode()))
