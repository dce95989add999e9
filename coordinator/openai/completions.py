"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from coordinator.caller import Caller
from coordinator.openai.answers import Frame
from coordinator.openai.chat_body import ChatBody
from coordinator.openai.chat_chunks import ChatChunks
from coordinator.openai.chat_request import CHAT_NOT_SERVED, ChatRequest
from coordinator.openai.completion_answers import CompletionBody, CompletionChunks
from coordinator.openai.completion_request import COMPLETION_NOT_SERVED, CompletionRequest
from coordinator.openai.endpoint import Call, Desk
from coordinator.openai.fields import GenerationFields, check_copies, parsed
from coordinator.openai.generations import Generations, answer, stream
from coordinator.openai.logprobs import TokenTexts
from coordinator.openai.tool_parser import ToolCallParser
from splitserve.v1 import inference_pb2


class Completions:
    """Both endpoints of generated text."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._door = desk.door

    async def chat(self, call: Call) -> None:
        """POST /v1/chat/completions."""
        caller = self._desk.caller(call)
        body = await self._desk.json_body(call)
        request = parsed(ChatRequest, body, CHAT_NOT_SERVED)
        check_copies(request.choices, body)
        call.names = request.names
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        frame = self._frame(call, caller, request, "chatcmpl-", kind)
        wanted = self._generations(call, caller, request, request.generations(), frame)
        texts = await self._texts(request.model, caller) if request.logprobs else None
        if not request.stream:
            bodies = [
                ChatBody(index, texts=texts, has_tools=request.uses_tools) for index in range(request.choices)
            ]
            await answer(call.exchange, self._door, wanted, bodies)
            return
        chunks = [
            ChatChunks(
                frame,
                index,
                has_usage=request.include_usage,
                texts=texts,
                parser=ToolCallParser() if request.uses_tools else None,
            )
            for index in range(request.choices)
        ]
        await stream(call.exchange, self._door, wanted, chunks, has_usage=request.include_usage)

    async def completion(self, call: Call) -> None:
        """POST /v1/completions."""
        caller = self._desk.caller(call)
        body = await self._desk.json_body(call)
        request = parsed(CompletionRequest, body, COMPLETION_NOT_SERVED)
        check_copies(request.choices, body)
        call.names = request.names
        frame = self._frame(call, caller, request, "cmpl-", "text_completion")
        wanted = self._generations(call, caller, request, request.generations(), frame)
        texts = None if request.logprobs is None else await self._texts(request.model, caller)
        echoes = await self._echoes(request, wanted)
        if not request.stream:
            bodies = [CompletionBody(index, echo=echo, texts=texts) for index, echo in enumerate(echoes)]
            await answer(call.exchange, self._door, wanted, bodies)
            return
        chunks = [
            CompletionChunks(frame, index, has_usage=request.include_usage, echo=echo, texts=texts)
            for index, echo in enumerate(echoes)
        ]
        await stream(call.exchange, self._door, wanted, chunks, has_usage=request.include_usage)

    def _frame(self, call: Call, caller: Caller, request: GenerationFields, prefix: str, kind: str) -> Frame:
        model = self._door.model_name(request.model or "", caller)
        return Frame(f"{prefix}{call.request_id}", kind, int(time.time()), model)

    def _generations(
        self,
        call: Call,
        caller: Caller,
        fields: GenerationFields,
        requests: Sequence[inference_pb2.GenerateRequest],
        frame: Frame,
    ) -> Generations:
        for index, request in enumerate(requests):
            request.request_id = call.request_id if len(requests) == 1 else f"{call.request_id}-{index}"
        return Generations(requests, caller, fields.choices, frame)

    async def _texts(self, model: str | None, caller: Caller) -> TokenTexts:
        return TokenTexts(await self._door.tokenizer(model or "", caller))

    async def _echoes(self, request: CompletionRequest, wanted: Generations) -> list[str]:
        """What each choice's text begins with."""
        if not request.echo:
            return [""] * len(wanted.requests)
        if all(isinstance(prompt, str) for prompt in request.prompt):
            return [one.text for one in wanted.requests]
        tokenizer = await self._door.tokenizer(request.model or "", wanted.caller)
        return [one.text or tokenizer.decode(one.token_ids.ids) for one in wanted.requests]
