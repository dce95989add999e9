"""The paths of the OpenAI-compatible API and their handlers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.routing import Route, Router
from typing_extensions import override

from coordinator.entrypoints.http.exchange import (
    READS,
    ApiPath,
    Endpoint,
    HttpError,
    HttpExchange,
    json_bytes,
)
from coordinator.entrypoints.inference_api import InferenceApi, require_admin, shutting_down
from coordinator.entrypoints.openai.bodies import (
    DONE_EVENT,
    Choice,
    ChoiceBuilder,
    ChoiceStream,
    Extras,
    Fields,
    Frame,
    GenerationFields,
    Unsupported,
    UsageSum,
    check_copies,
    dumped,
    parsed,
    usage_event,
)
from coordinator.entrypoints.openai.call_grammar import function_in
from coordinator.entrypoints.openai.chat import (
    CHAT_NOT_SERVED,
    ChatRequest,
    ChatResponse,
    ChatStream,
    TemplateFields,
)
from coordinator.entrypoints.openai.completion import (
    COMPLETION_NOT_SERVED,
    CompletionRequest,
    CompletionResponse,
    CompletionStream,
)
from coordinator.entrypoints.openai.formats.answer import AnswerParser
from coordinator.entrypoints.openai.formats.table import AnswerFormat, choose_format, format_named
from coordinator.entrypoints.openai.logprobs import TokenTexts
from coordinator.request.inference_request import (
    CHAT_PREFIX,
    COMPLETION_PREFIX,
    Caller,
    Operation,
    RequestTrace,
    choice_id,
)
from coordinator.request.sending import Output
from splitserve import __version__
from splitserve.errors import InvalidArgumentError, NotFoundError, SplitserveError, UnavailableError
from splitserve.generation.output_delta import TokenDelta
from splitserve.logs import log_event
from splitserve.metrics import Metrics, Read
from splitserve.models.tokenizer import Tokenizer
from splitserve.runtime.call_thread import SHORT_BYTES, ParserThread
from splitserve.v1 import generation_pb2, inference_pb2

TEXT_BYTES, LOGPROBS_BYTES, PROMPT_VALUE_BYTES = 8, 1024, 64
"""About the size of a token in a response, without and with logprobs, and of a log-probability of the prompt."""
MAX_NAMED_ROUNDS = 4
"""How many refused grammars give up only the schemas that the error names. The next one gives up all schemas."""
KEPT_BYTES, MAX_CHOSEN = 512, 1024
"""Longest arguments of a chat template for which the chosen format is kept, and how many formats are."""
MAX_SHOWN = 32
"""Most names of tools in a header and in an event."""
F = TypeVar("F", bound=Fields)


class AnswerFormats:
    """The answer formats of all models, each chosen once for equal arguments of the chat template, unless these are
    long. `tool_format` and `reasoning_format` are the settings."""

    def __init__(self, api: InferenceApi, tool_format: str, reasoning_format: str) -> None:
        self._api = api
        self._names = tool_format, reasoning_format
        self._chosen: dict[tuple[str, bool, bytes], AnswerFormat] = {}

    async def of(
        self, request: ChatRequest, request_id: str, caller: Caller
    ) -> tuple[AnswerFormat, SplitserveError | None]:
        """The format of the answers to a request, and why the request cannot be served, if that is known already.

        Raises InvalidArgumentError if the request demands tool calls and the settings find none.
        """
        name, key = request.model or "", request.session_id or request_id
        failure = None
        try:
            source, tokenizer = await self._api.tokenizer_of(name, key, caller)
            answer = await self._of_template(request, source, tokenizer, caller)
            if request.continue_final_message:
                answer = answer.continuing(request.messages[-1].content)
        except SplitserveError as error:
            answer, failure = format_named(*self._names, with_tools=request.uses_tools), error
        return (answer.forced() if request.must_call else answer), failure

    async def _of_template(
        self, request: ChatRequest, source: str, tokenizer: Tokenizer, caller: Caller
    ) -> AnswerFormat:
        chat, tokenizers = inference_pb2.ChatMessages(), self._api.tokenizers
        if request.model_fields_set & TemplateFields.model_fields.keys():
            # On the parser thread: the fields may be long.
            chat = await self._api.parser.run(SHORT_BYTES + 1, request.template_fields, with_documents=False)
        if chat.continue_final_message:  # the format of other requests; the message shows where it goes on
            chat.ClearField("continue_final_message")
            chat.ClearField("add_generation_prompt")
        kind = source, request.uses_tools, chat.SerializeToString()
        if kind in self._chosen:
            return self._chosen[kind]

        def choose() -> AnswerFormat:
            arguments = tokenizers.arguments(chat)
            return choose_format(tokenizer, *self._names, with_tools=request.uses_tools, arguments=arguments)

        # In turn with other prompts: the choice renders one.
        answer = await tokenizers.in_turn(caller.tenant, chat.ByteSize(), choose)
        if chat.ByteSize() <= KEPT_BYTES:
            if len(self._chosen) >= MAX_CHOSEN:
                self._chosen.clear()
            self._chosen[kind] = answer
        return answer

    async def grammar(
        self, request: ChatRequest, answer: AnswerFormat, caller: Caller, size: int
    ) -> tuple[generation_pb2.Grammar | None, list[str]]:
        """The grammar of the answers to a request of `size` bytes, and the names of the tools whose schemas the grammar
        does not enforce. A schema that no grammar can enforce fails the request only if it must be strict.

        Raises SplitserveError if the grammar cannot be checked now.
        """
        loose: set[int] = set()
        grammar = await self._api.parser.run(size, request.grammar, answer, loose)
        rounds = 0
        while grammar is not None and (lenient := request.lenient_functions - loose):
            try:
                await self._api.check_grammar(grammar, caller)
                break
            except InvalidArgumentError as error:
                named = function_in(error.message)
                loose |= {named} if named in lenient and rounds < MAX_NAMED_ROUNDS else lenient
                rounds += 1
                grammar = await self._api.parser.run(size, request.grammar, answer, loose)
        names = request.function_names(loose)[:MAX_SHOWN]
        if names:
            log_event("tools.loosened", request_tools=names, model=request.model or "")
        return grammar, names


class OpenAIServing:
    """The chat and completion endpoints."""

    def __init__(self, api: InferenceApi, formats: AnswerFormats) -> None:
        self._api = api
        self._formats = formats

    async def chat(self, exchange: HttpExchange) -> None:
        """POST /v1/chat/completions."""
        caller = exchange.caller()
        body = await exchange.json_body()
        request = await self.parsed(ChatRequest, body, CHAT_NOT_SERVED)
        check_copies(request.choices, body)
        exchange.field_names = request.names
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        frame = self._frame(exchange, caller, request, CHAT_PREFIX, kind)
        choice_requests, parsers = await self.prepared(exchange, caller, request, len(body))
        extras = await self._extras(request, caller, has_logprobs=bool(request.logprobs))
        if request.stream:
            chunks = [ChatStream(frame, index, extras, parser) for index, parser in enumerate(parsers)]
            await stream(exchange, self._api, choice_requests, chunks)
        else:
            bodies = [ChatResponse(frame, index, extras, parser) for index, parser in enumerate(parsers)]
            await respond(exchange, self._api, choice_requests, bodies)

    async def prepared(
        self, exchange: HttpExchange, caller: Caller, request: ChatRequest, size: int
    ) -> tuple[ChoiceRequests, list[AnswerParser | None]]:
        """What a chat request of `size` bytes asks of the request flow, and the parser of each choice. Headers about
        it are added to the response. Raises SplitserveError."""
        answer, failure = await self._formats.of(request, exchange.request_id, caller)
        grammar, loose = await self._formats.grammar(request, answer, caller, size)
        if loose:
            exchange.response_headers.append((b"x-loose-tools", ",".join(loose).encode()))
        requests = await self._api.parser.run(
            size, request.generate_requests, grammar, keep_special=answer.keep_special
        )
        choice_requests = self._choice_requests(exchange, caller, request, requests, failure)
        return choice_requests, [request.parser(answer) for _ in requests]

    async def completion(self, exchange: HttpExchange) -> None:
        """POST /v1/completions."""
        caller = exchange.caller()
        body = await exchange.json_body()
        request = await self.parsed(CompletionRequest, body, COMPLETION_NOT_SERVED)
        check_copies(request.choices, body)
        exchange.field_names = request.names
        frame = self._frame(exchange, caller, request, COMPLETION_PREFIX, "text_completion")
        requests = await self._api.parser.run(len(body), request.generate_requests)
        choice_requests = self._choice_requests(exchange, caller, request, requests)
        extras = await self._extras(request, caller, has_logprobs=request.logprobs is not None)
        echoes = await self._echoes(request, choice_requests)
        if request.stream:
            chunks = [CompletionStream(frame, index, extras, echo) for index, echo in enumerate(echoes)]
            await stream(exchange, self._api, choice_requests, chunks)
        else:
            bodies = [CompletionResponse(frame, index, extras, echo) for index, echo in enumerate(echoes)]
            await respond(exchange, self._api, choice_requests, bodies)

    async def parsed(self, kind: type[F], body: bytes, unsupported: Unsupported) -> F:
        """The fields of a request's body. Raises InvalidArgumentError."""
        most_values = self._api.limits.context_tokens
        return await self._api.parser.run(len(body), parsed, kind, body, unsupported, most_values)

    def _frame(
        self, exchange: HttpExchange, caller: Caller, request: GenerationFields, prefix: str, kind: str
    ) -> Frame:
        model = self._api.routes.public_name(request.model or "", caller)
        return Frame(f"{prefix}{exchange.request_id}", kind, int(time.time()), model)

    def _choice_requests(
        self,
        exchange: HttpExchange,
        caller: Caller,
        fields: GenerationFields,
        requests: list[inference_pb2.GenerateRequest],
        failure: SplitserveError | None = None,
    ) -> ChoiceRequests:
        for index, request in enumerate(requests):
            request.request_id = (
                exchange.request_id if len(requests) == 1 else choice_id(exchange.request_id, index)
            )
        operation: Operation = "chat" if requests[0].HasField("chat") else "text_completion"
        parent = exchange.header(b"traceparent")
        trace = self._api.begin_trace(parent, exchange.joined(b"tracestate") if parent else None, operation)
        if trace is not None and self._api.traces:
            exchange.response_headers.append((b"traceparent", trace.context.traceparent.encode()))
        return ChoiceRequests(requests, caller, fields, trace, failure)

    async def _extras(self, request: GenerationFields, caller: Caller, *, has_logprobs: bool) -> Extras:
        texts = prompt_texts = None
        if has_logprobs or request.prompt_logprobs is not None:
            tokenizer = await self._api.tokenizer(request.model or "", caller)
            as_ids, keep_special = bool(request.return_tokens_as_token_ids), request.keeps_special
            if has_logprobs:
                texts = TokenTexts(tokenizer, as_ids=as_ids, keep_special=keep_special)
            if request.prompt_logprobs is not None:
                prompt_texts = TokenTexts(tokenizer, keep_special=keep_special)
        has_ids = bool(request.return_token_ids)
        return Extras(request.include_usage, request.counts_continuously, has_ids, texts, prompt_texts)

    async def _echoes(self, request: CompletionRequest, choice_requests: ChoiceRequests) -> list[str | None]:
        """The prompt text that each choice begins with; None without `echo`."""
        if not request.echo:
            return [None] * len(choice_requests.requests)
        tokenizer = None
        if not all(isinstance(prompt, str) for prompt in request.prompt):
            tokenizer = await self._api.tokenizer(request.model or "", choice_requests.caller)
        prompts = choice_requests.requests[:: request.choices]

        def decoded() -> list[str | None]:
            texts = [
                prompt.text
                if tokenizer is None
                else tokenizer.decode(prompt.token_ids.ids, keep_special=request.keeps_special)
                for prompt in prompts
            ]
            return [text for text in texts for _ in range(request.choices)]

        return await self._api.parser.run(sum(prompt.ByteSize() for prompt in prompts), decoded)


@dataclass(frozen=True, slots=True)
class ChoiceRequests:
    """The requests of one HTTP request, one per choice."""

    requests: list[inference_pb2.GenerateRequest]
    """In order of the choices' indices. Each is removed when it begins."""
    caller: Caller
    fields: GenerationFields
    trace: RequestTrace | None
    """The trace of the first choice; the traces of the others are its siblings."""
    failure: SplitserveError | None
    """Why the requests cannot be served, where preparing them has shown it."""


async def stream(
    exchange: HttpExchange,
    api: InferenceApi,
    choice_requests: ChoiceRequests,
    choices: Sequence[ChoiceStream],
) -> None:
    """Sends events as deltas arrive. Nothing is sent before the first delta: an earlier error gets an HTTP status."""
    async with exchange.while_connected():
        usage = await run_choices(exchange, api, choice_requests, choices)
        first = choices[0]
        last = usage_event(first.frame, usage.to_json()) if first.extras.has_usage else b""
        await exchange.end_events(last + DONE_EVENT)


async def respond(
    exchange: HttpExchange,
    api: InferenceApi,
    choice_requests: ChoiceRequests,
    choices: Sequence[ChoiceBuilder],
) -> None:
    """Sends one JSON object when all choices are complete."""

    def rendered() -> bytes:
        made, kept = choice_requests.fields.choices, choice_requests.fields.kept_choices
        order = list(range(len(choices)))
        for index in order:
            choices[index].share_prompt(choices[index - index % made])
        if kept < made:  # those with the highest mean log-probability
            groups = [order[start : start + made] for start in range(0, len(order), made)]
            best = [sorted(group, key=lambda index: -choices[index].mean_logprob)[:kept] for group in groups]
            order = [index for group in best for index in group]
        bodies = ",".join(
            dumped(choices[index].to_json() | {"index": place}) for place, index in enumerate(order)
        )
        head = dumped(choices[0].frame.head() | choices[0].beside_choices())[:-1]
        return f'{head}, "choices": [{bodies}], "usage": {dumped(usage.to_json())}}}'.encode()

    async with exchange.while_connected():
        usage = await run_choices(exchange, api, choice_requests, choices)
        extras = choices[0].extras
        size = usage.completion_tokens * (TEXT_BYTES if extras.texts is None else LOGPROBS_BYTES)
        size += usage.prompt_values * PROMPT_VALUE_BYTES
        if extras.token_ids:
            size += usage.prompt_tokens * TEXT_BYTES
        await exchange.respond(200, await api.parser.run(size, rendered))


@dataclass(frozen=True, slots=True)
class _ChoiceOutput(Output):
    """The output of one choice. The first events may be long."""

    exchange: HttpExchange
    parser: ParserThread
    choice: Choice
    usage: UsageSum
    index: int

    @override
    async def send(self, delta: TokenDelta, started: inference_pb2.GenerationStart | None) -> None:
        choice, events = self.choice, b""
        if started is not None:
            size = choice.size + TEXT_BYTES * len(started.prompt_token_ids)
            events = await self.parser.run(size, choice.begin, started)
        if delta.prompt_logprobs is not None:
            self.usage.add_prompt_logprobs(delta.prompt_logprobs)
        if events := events + choice.delta(delta):
            await self.exchange.event(events)

    @override
    async def end(self, done: inference_pb2.GenerationDone) -> None:
        self.usage.add(self.index, done, self.choice.reasoning_tokens)
        if events := self.choice.done(done):
            await self.exchange.event(events)

    @override
    def takes_now(self) -> bool:
        return self.exchange.takes_events if self.choice.streams else True

    @override
    def send_now(self, delta: TokenDelta) -> None:
        if events := self.choice.delta(delta):
            self.exchange.event_now(events)


async def run_choices(
    exchange: HttpExchange, api: InferenceApi, choice_requests: ChoiceRequests, choices: Sequence[Choice]
) -> UsageSum:
    """Runs all choices concurrently; the first failure cancels the others. The event loop serves others between the
    beginnings of two choices. Sends the events of choices that stream, and returns the token counts."""
    usage = UsageSum(choice_requests.fields.choices)
    outputs = [
        _ChoiceOutput(exchange, api.parser, choice, usage, index) for index, choice in enumerate(choices)
    ]
    caller, trace, failure = choice_requests.caller, choice_requests.trace, choice_requests.failure
    if len(outputs) == 1:
        request = choice_requests.requests[0]
        await api.generate(request, caller, outputs[0], trace=trace, failure=failure)
        return usage
    async with asyncio.TaskGroup() as group:
        for output in outputs:
            # A request is freed when it ends: freeing a hundred long ones at once would stall the event loop.
            request = choice_requests.requests.pop(0)
            group.create_task(api.generate(request, caller, output, trace=trace, failure=failure))
            trace = trace.sibling() if trace is not None else None
            await asyncio.sleep(0)
    return usage


def make_app(
    api: InferenceApi,
    read_metrics: Read,
    completions: OpenAIServing,
    others: Sequence[ApiPath] = (),
    origins: Collection[str] = (),
) -> Router:
    """The ASGI application of the API. `read_metrics` returns the metrics that `/metrics` shows. `others`: paths of
    other APIs and of the page. `origins`: whose pages may read the responses of shared paths."""
    info = InfoEndpoints(api, read_metrics)
    paths = [
        ApiPath(("POST",), "/v1/chat/completions", completions.chat),
        ApiPath(("POST",), "/v1/completions", completions.completion),
        ApiPath(READS, "/v1/models", info.models),
        ApiPath(READS, "/v1/models/{model:path}", info.model),
        ApiPath(READS, "/health", info.health),
        ApiPath(READS, "/ready", info.ready),
        ApiPath(READS, "/metrics", info.metrics),
        ApiPath(READS, "/version", info.version),
        *others,
    ]

    def endpoint(path: ApiPath) -> Endpoint:
        return Endpoint(path, api.authenticator, api.limits, origins)

    # A bare Router: Starlette's application class would wrap every `send` twice, and Endpoint handles errors already.
    unknown = endpoint(ApiPath((), "", _unknown))
    routes = [Route(path.path, endpoint(path)) for path in paths]
    return Router(routes, redirect_slashes=False, default=unknown)


async def _unknown(exchange: HttpExchange) -> None:
    raise HttpError(404, "there is nothing at this path", "NOT_FOUND")


class InfoEndpoints:
    """The GET endpoints. `read_metrics` returns the same metrics as the metrics port serves."""

    def __init__(self, api: InferenceApi, read_metrics: Read) -> None:
        self._api = api
        self._started = int(time.time())
        self._metrics = CollectorRegistry()
        self._metrics.register(Metrics(read_metrics))

    async def models(self, exchange: HttpExchange) -> None:
        """GET /v1/models."""
        models = await self._api.models(exchange.caller())
        await exchange.respond(
            200, json_bytes({"object": "list", "data": [self._shown(model) for model in models]})
        )

    async def model(self, exchange: HttpExchange) -> None:
        """GET /v1/models/{model}."""
        name = exchange.path_params["model"]
        for model in await self._api.models(exchange.caller()):
            if model.name == name:
                await exchange.respond(200, json_bytes(self._shown(model)))
                return
        message = f"model {name[:128]!r} is not served here"
        raise NotFoundError(message, reason="MODEL_NOT_FOUND", field="model")

    async def health(self, exchange: HttpExchange) -> None:
        """GET /health: the process is alive."""
        await exchange.respond(200, json_bytes({"status": "ok"}))

    async def ready(self, exchange: HttpExchange) -> None:
        """GET /ready: at least one model has a complete pair of workers, or workers that are started on demand."""
        if self._api.draining:
            raise shutting_down()
        if not self._api.is_ready:
            message = "no model has a prefill and a decode worker that are ready"
            raise UnavailableError(message, reason="NO_WORKER")
        await exchange.respond(200, json_bytes({"status": "ready"}))

    async def version(self, exchange: HttpExchange) -> None:
        """GET /version."""
        exchange.caller()
        await exchange.respond(200, json_bytes({"version": __version__}))

    async def metrics(self, exchange: HttpExchange) -> None:
        """GET /metrics, for admins."""
        require_admin(exchange.caller())
        encode, content_type = choose_encoder(exchange.header(b"accept") or "")
        # On a thread, like scrapes of the metrics port: it may take milliseconds.
        text = await asyncio.to_thread(encode, self._metrics)
        await exchange.respond(200, text, content_type.encode())

    def _shown(self, model: inference_pb2.ModelInfo) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "splitserve",
            "root": model.parent or model.name,
            "parent": model.parent or None,
            "max_model_len": model.context_tokens,
        }
