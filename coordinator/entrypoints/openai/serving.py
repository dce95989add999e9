"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from coordinator.entrypoints.http.exchange import HttpExchange
from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.entrypoints.openai.chat_request import CHAT_NOT_SERVED, ChatRequest
from coordinator.entrypoints.openai.chat_response import ChatResponse, ChatStream
from coordinator.entrypoints.openai.completion import (
    COMPLETION_NOT_SERVED,
    CompletionRequest,
    CompletionResponse,
    CompletionStream,
)
from coordinator.entrypoints.openai.fields import GenerationFields, Unsupported, check_copies, parsed
from coordinator.entrypoints.openai.logprobs import TokenTexts
from coordinator.entrypoints.openai.response import (
    DONE_EVENT,
    ChoiceBuilder,
    ChoiceStream,
    Frame,
    UsageSum,
    dumped,
    usage_event,
)
from coordinator.entrypoints.openai.tool_parser import ToolCallParser
from coordinator.request.caller import Caller
from coordinator.request.ids import CHAT_PREFIX, COMPLETION_PREFIX, choice_id
from coordinator.request.request_trace import Operation, RequestTrace
from coordinator.request.sending import DirectSend, Send
from splitserve.v1 import generation_pb2, inference_pb2

TEXT_BYTES, LOGPROBS_BYTES = 8, 1024
"""What a token takes in a response, about."""
F = TypeVar("F", bound=GenerationFields)


class OpenAIServing:
    """The chat and completion endpoints."""

    def __init__(self, api: InferenceApi) -> None:
        self._api = api

    async def chat(self, exchange: HttpExchange) -> None:
        """POST /v1/chat/completions."""
        caller = exchange.caller()
        body = await exchange.json_body()
        request = await self._parsed(ChatRequest, body, CHAT_NOT_SERVED)
        exchange.field_names = request.names
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        frame = self._frame(exchange, caller, request, CHAT_PREFIX, kind)
        requests = await self._api.parser.run(len(body), request.generate_requests)
        choice_requests = self._choice_requests(exchange, caller, request, requests, frame)
        texts = await self._texts(request.model, caller) if request.logprobs else None
        if not request.stream:
            bodies = [
                ChatResponse(index, texts=texts, has_tools=request.uses_tools)
                for index in range(request.choices)
            ]
            await respond(exchange, self._api, choice_requests, bodies)
            return
        chunks = [
            ChatStream(
                frame,
                index,
                has_usage=request.include_usage,
                texts=texts,
                parser=ToolCallParser() if request.uses_tools else None,
            )
            for index in range(request.choices)
        ]
        await stream(exchange, self._api, choice_requests, chunks, has_usage=request.include_usage)

    async def completion(self, exchange: HttpExchange) -> None:
        """POST /v1/completions."""
        caller = exchange.caller()
        body = await exchange.json_body()
        request = await self._parsed(CompletionRequest, body, COMPLETION_NOT_SERVED)
        exchange.field_names = request.names
        frame = self._frame(exchange, caller, request, COMPLETION_PREFIX, "text_completion")
        requests = await self._api.parser.run(len(body), request.generate_requests)
        choice_requests = self._choice_requests(exchange, caller, request, requests, frame)
        texts = None if request.logprobs is None else await self._texts(request.model, caller)
        echoes = await self._echoes(request, choice_requests)
        if not request.stream:
            bodies = [CompletionResponse(index, echo=echo, texts=texts) for index, echo in enumerate(echoes)]
            await respond(exchange, self._api, choice_requests, bodies)
            return
        chunks = [
            CompletionStream(frame, index, has_usage=request.include_usage, echo=echo, texts=texts)
            for index, echo in enumerate(echoes)
        ]
        await stream(exchange, self._api, choice_requests, chunks, has_usage=request.include_usage)

    async def _parsed(self, kind: type[F], body: bytes, unsupported: Unsupported) -> F:
        most_values = self._api.limits.context_tokens
        request = await self._api.parser.run(len(body), parsed, kind, body, unsupported, most_values)
        check_copies(request.choices, body)
        return request

    def _frame(
        self, exchange: HttpExchange, caller: Caller, request: GenerationFields, prefix: str, kind: str
    ) -> Frame:
        model = self._api.model_name(request.model or "", caller)
        return Frame(f"{prefix}{exchange.request_id}", kind, int(time.time()), model)

    def _choice_requests(
        self,
        exchange: HttpExchange,
        caller: Caller,
        fields: GenerationFields,
        requests: list[inference_pb2.GenerateRequest],
        frame: Frame,
    ) -> ChoiceRequests:
        for index, request in enumerate(requests):
            request.request_id = (
                exchange.request_id if len(requests) == 1 else choice_id(exchange.request_id, index)
            )
        has_logprobs = any(request.sampling.HasField("logprobs") for request in requests[:1])
        operation: Operation = "chat" if requests[0].HasField("chat") else "text_completion"
        parent = exchange.header(b"traceparent")
        trace = self._api.begin_trace(parent, exchange.joined(b"tracestate") if parent else None, operation)
        if trace is not None and self._api.traces:
            exchange.response_headers.append((b"traceparent", trace.context.traceparent.encode()))
        return ChoiceRequests(requests, caller, fields.choices, frame, has_logprobs, trace)

    async def _texts(self, model: str | None, caller: Caller) -> TokenTexts:
        return TokenTexts(await self._api.tokenizer(model or "", caller))

    async def _echoes(self, request: CompletionRequest, choice_requests: ChoiceRequests) -> list[str]:
        """The prompt text that each choice begins with; empty without `echo`."""
        if not request.echo:
            return [""] * len(choice_requests.requests)
        if all(isinstance(prompt, str) for prompt in request.prompt):
            return [one.text for one in choice_requests.requests]
        tokenizer = await self._api.tokenizer(request.model or "", choice_requests.caller)
        each = request.choices
        prompts = choice_requests.requests[::each]

        def decoded() -> list[str]:
            texts = [one.text or tokenizer.decode(one.token_ids.ids) for one in prompts]
            return [text for text in texts for _ in range(each)]

        return await self._api.parser.run(sum(one.ByteSize() for one in prompts), decoded)


@dataclass(frozen=True, slots=True)
class ChoiceRequests:
    """The requests of one HTTP request, one per choice."""

    requests: list[inference_pb2.GenerateRequest]
    """In order of the choices' indices; taken out as they begin."""
    caller: Caller
    choices_per_prompt: int
    frame: Frame
    has_logprobs: bool
    trace: RequestTrace | None = None
    """That of the first choice; those of the others are beside it."""


async def stream(
    exchange: HttpExchange,
    api: InferenceApi,
    choice_requests: ChoiceRequests,
    choices: Sequence[ChoiceStream],
    *,
    has_usage: bool,
) -> None:
    """Sends events as deltas arrive. Nothing is sent before the first, so that earlier errors get an HTTP status."""
    usage = UsageSum(choice_requests.choices_per_prompt)
    direct = [_DirectEvents(exchange, choice) for choice in choices]

    def sender(index: int) -> Send:
        choice, write = choices[index], exchange.event

        async def send(response: inference_pb2.GenerateResponse) -> None:
            if response.HasField("done"):
                usage.add(index, response.done)
                events = choice.done(response.done)
            else:
                events = choice.delta(response.delta)
            if events:
                await write(events)

        return send

    async with exchange.while_connected():
        await _run(api, choice_requests, [(sender(index), direct[index]) for index in range(len(choices))])
        last = usage_event(choice_requests.frame, usage.to_json()) if has_usage else b""
        await exchange.end_events(last + DONE_EVENT)


async def respond(
    exchange: HttpExchange,
    api: InferenceApi,
    choice_requests: ChoiceRequests,
    choices: Sequence[ChoiceBuilder],
) -> None:
    """Sends one JSON object once all choices are complete."""
    usage = UsageSum(choice_requests.choices_per_prompt)
    ended: dict[int, inference_pb2.GenerationDone] = {}

    def sender(index: int) -> Send:
        choice = choices[index]

        async def send(response: inference_pb2.GenerateResponse) -> None:
            if response.HasField("done"):
                usage.add(index, response.done)
                ended[index] = response.done
            else:
                choice.delta(response.delta)

        return send

    def rendered() -> bytes:
        shown = ",".join(dumped(choice.to_json(ended[index])) for index, choice in enumerate(choices))
        head = dumped(choice_requests.frame.head())[:-1]
        return f'{head}, "choices": [{shown}], "usage": {dumped(usage.to_json())}}}'.encode()

    async with exchange.while_connected():
        await _run(
            api,
            choice_requests,
            [(sender(index), _DirectPieces(choice)) for index, choice in enumerate(choices)],
        )
        size = usage.completion_tokens * (LOGPROBS_BYTES if choice_requests.has_logprobs else TEXT_BYTES)
        await exchange.respond(200, await api.parser.run(size, rendered))


@dataclass(frozen=True, slots=True)
class _DirectEvents:
    """The DirectSend of a streamed choice."""

    exchange: HttpExchange
    choice: ChoiceStream

    def is_ready(self) -> bool:
        return self.exchange.takes_events

    def send(self, delta: generation_pb2.OutputDelta) -> None:
        if events := self.choice.delta(delta):
            self.exchange.event_now(events)


@dataclass(frozen=True, slots=True)
class _DirectPieces:
    """The DirectSend of a choice that is kept until it is complete."""

    choice: ChoiceBuilder

    def is_ready(self) -> bool:
        return True

    def send(self, delta: generation_pb2.OutputDelta) -> None:
        self.choice.delta(delta)


async def _run(
    api: InferenceApi, choice_requests: ChoiceRequests, senders: Sequence[tuple[Send, DirectSend]]
) -> None:
    """Runs all choices concurrently; the first failure cancels the others. They begin one after the other, so that what
    each does first does not add up to a pause of everything else."""
    trace = choice_requests.trace
    if len(senders) == 1:
        send, direct = senders[0]
        await api.generate(
            choice_requests.requests[0], choice_requests.caller, send, trace=trace, direct=direct
        )
        return
    async with asyncio.TaskGroup() as group:
        for send, direct in senders:
            # Taken out, so that each is freed when it ends: a hundred long ones at once take longer than a pause may.
            request = choice_requests.requests.pop(0)
            group.create_task(api.generate(request, choice_requests.caller, send, trace=trace, direct=direct))
            trace = trace.sibling() if trace is not None else None
            await asyncio.sleep(0)
