"""The API below all entrypoints (gRPC, KServe, OpenAI over HTTP): one request limit, one drain, one set of models."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from coordinator.models.model_routes import ModelRoutes, Nameable
from coordinator.models.tokenizers import PromptTokenizers
from coordinator.request.inference_request import (
    Authenticator,
    Caller,
    Operation,
    RequestTrace,
    check_highest,
    check_prompt_form,
)
from coordinator.request.sending import Output
from coordinator.request_flow import RequestFlow
from coordinator.routing.router import RETRY_AFTER_S
from coordinator.telemetry.request_stats import RequestStats
from coordinator.tenants.usage import Bucket, Limit
from coordinator.workers.client import BackgroundTasks
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Model
from splitserve.config.tracing import RequestTracingConfig
from splitserve.errors import PermissionDeniedError, ResourceExhaustedError, SplitserveError, UnavailableError
from splitserve.models.tokenizer import Tokenizer
from splitserve.runtime.call_thread import ParserThread
from splitserve.tracing.context import TraceContext
from splitserve.v1 import generation_pb2, inference_pb2

DRAW_BITS = 53
ID_BYTES = 4
"""About the size of a token's text, by which detokenization takes its turn."""


class TraceSampler:
    """Follows the sampling decisions of clients, and samples `sample_ratio` of the other requests.

    At most `max_client_traces_per_s` requests of all clients together are traced because clients ask for it, so that no
    client can have every request exported.
    """

    def __init__(self, config: RequestTracingConfig) -> None:
        self.enabled = config.endpoint is not None
        self._ratio, per_s = config.sample_ratio, config.max_client_traces_per_s
        self._bucket = Bucket(Limit(per_s, max(1.0, per_s)), 0.0) if per_s else None

    def begin(
        self,
        client: TraceContext | None,
        operation: Operation,
        now: float,
        resumed: TraceContext | None = None,
    ) -> RequestTrace | None:
        """The trace of a request that arrived at `now`, in seconds of the monotonic clock; None: it has none.

        `client`: the context that the client sent. Without one, a resumed answer continues the trace of `resumed`.
        """
        parent = client or resumed
        if not self.enabled:
            return RequestTrace(replace(parent, sampled=False), operation=operation) if parent else None
        if parent is None:
            return RequestTrace(TraceContext.new(sampled=self._drawn()), operation=operation)
        sampled = parent.sampled and (self._grants(now) or self._drawn())
        own = replace(parent.child(), sampled=sampled)
        return RequestTrace(own, parent.span_id, operation, resumed)

    def _drawn(self) -> bool:
        return secrets.randbits(DRAW_BITS) < self._ratio * (1 << DRAW_BITS)

    def _grants(self, now: float) -> bool:
        if self._bucket is None or self._bucket.wait_s(1.0, now) > 0:
            return False
        self._bucket.spend(1.0, now)
        return True


LEAST_BYTES = 2 * 2**20
"""Size of a request that is always allowed: room for schemas, tools and a batch of short prompts."""
BYTES_PER_TOKEN = 16
"""Bytes of a request per token of context. A token of a real prompt takes up to 9 bytes in JSON."""
OPERATOR_BYTES = 2**20
"""Largest request of the services for operators."""
CLIENT_SERVICES = (
    "splitserve.v1.InferenceService",
    "inference.GRPCInferenceService",
    "vllm.grpc.engine.VllmEngine",
)
OPERATOR_SERVICES = ("splitserve.v1.RoutesService", "splitserve.v1.ScalingService")


class InputLimits:
    """Bounds of requests. They grow with the contexts of the registered models."""

    def __init__(self, known_models: Callable[[], Mapping[str, Model]], max_message_bytes: int) -> None:
        self._known_models = known_models
        self._max_message_bytes = max_message_bytes

    @property
    def context_tokens(self) -> int:
        """The longest context of a known model; 0 while none is known."""
        return max((model.context_tokens for model in self._known_models().values()), default=0)

    @property
    def request_bytes(self) -> int:
        """The most bytes of a client's request, on any entrypoint."""
        return min(self._max_message_bytes, max(LEAST_BYTES, BYTES_PER_TOKEN * self.context_tokens))

    def limit_of(self, method: str) -> int | None:
        """The most bytes of a request of a gRPC method "/package.Service/Method"; None: the server's own bound."""
        service = method.split("/")[1]
        if service in CLIENT_SERVICES:
            return self.request_bytes
        return OPERATOR_BYTES if service in OPERATOR_SERVICES else None


@dataclass(slots=True, eq=False)
class InferenceApi:
    """Passes requests to the request flow, at most `max_running_requests` at a time."""

    flow: RequestFlow
    registry: Registry
    tokenizers: PromptTokenizers
    background: BackgroundTasks
    stats: RequestStats
    authenticator: Authenticator
    max_running_requests: int
    routes: ModelRoutes
    limits: InputLimits
    parser: ParserThread
    """Parses large requests and renders long answers, for all entrypoints."""
    sampler: TraceSampler
    draining: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request is running."""
    _running: set[asyncio.Timeout] = field(default_factory=set)
    _started_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def running(self) -> int:
        """Number of requests in progress."""
        return len(self._running)

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        output: Output,
        call_left_s: float | None = None,
        trace: RequestTrace | None = None,
        failure: SplitserveError | None = None,
    ) -> None:
        """Serves one request to its end. `output` takes the answer.

        `call_left_s` is the time left until the client's own deadline, `trace` comes from `begin_trace`. `failure` is
        the error that `tokenizer_of` has raised for this request; the request fails with it. Raises SplitserveError.
        Cancelling this cancels the request on both workers.
        """
        async with self._admitted(request.model):
            await self.flow.generate(request, caller, output, call_left_s, trace, failure)

    @property
    def traces(self) -> bool:
        """Whether this coordinator exports traces, so that clients are told theirs."""
        return self.sampler.enabled

    def begin_trace(
        self, traceparent: str | None, tracestate: str | None, operation: Operation, resumed: str = ""
    ) -> RequestTrace | None:
        """The trace of a request with these headers, which may be malformed; None if it has none.

        `resumed` is the `traceparent` of the answer that the request continues.
        """
        if not (self.traces or traceparent or resumed):
            return None
        client, earlier = TraceContext.parse(traceparent, tracestate), TraceContext.parse(resumed)
        return self.sampler.begin(client, operation, time.monotonic(), earlier)

    def end_all(self) -> None:
        """Ends running requests with UNAVAILABLE (DRAINING) and refuses new ones."""
        self.draining = True
        now = asyncio.get_running_loop().time()
        for running in self._running:
            running.reschedule(now)

    @property
    def is_ready(self) -> bool:
        """Whether requests for at least one model are accepted."""
        return not self.draining and bool(self.routes.ready_models)

    async def models(self, caller: Caller) -> list[inference_pb2.ModelInfo]:
        """The models that the caller may use, sorted by name."""
        return [await self._model_info(nameable, caller) for nameable in self.routes.nameable(caller)]

    async def tokenizer(self, name: str, caller: Caller) -> Tokenizer:
        """The tokenizer of the model of this name, which is resolved as by `generate`. Waits for no worker.

        Raises NotFoundError, or UnavailableError (NO_WORKER) before any worker has registered.
        """
        resolved = self.routes.find(name, "", caller) if self.registry.known_models() else None
        if resolved is None:
            raise UnavailableError(
                "no worker has registered", reason="NO_WORKER", retry_after_s=RETRY_AFTER_S
            )
        return await self.tokenizers.tokenizer(resolved.model.tokenizer_source)

    async def model(self, name: str, key: str, caller: Caller) -> Model:
        """The model that `generate` would choose for a request of this name and key. Waits for the first worker if
        needed. Raises the errors of `InputProcessor.find_model`."""
        return (await self.flow.inputs.find_model(name, key, caller)).model

    def most_at_once(self, caller: Caller) -> int:
        """How many requests one call may have in progress: half of what the caller's tenant may have, and no more than
        all callers. A line of a batch has one where the tenant has a limit, since half of the limit may be lines."""
        named = self.flow.tenants.named(caller.tenant) if self.flow.tenants else None
        limit = named[1] if named else None
        if limit is None:
            return self.max_running_requests
        return 1 if caller.priority_class == "batch" else min(self.max_running_requests, max(1, limit // 2))

    async def tokenizer_of(self, name: str, key: str, caller: Caller) -> tuple[str, Tokenizer]:
        """The source and the tokenizer of this `model`. Raises its errors, and those of loading."""
        source = (await self.model(name, key, caller)).tokenizer_source
        return source, await self.tokenizers.tokenizer(source)

    async def tokenize(
        self, request: inference_pb2.GenerateRequest, caller: Caller, *, add_special_tokens: bool
    ) -> tuple[Sequence[int], Model, Tokenizer]:
        """The tokens of a request's prompt, which may be longer than the context, with the model and its tokenizer.
        Raises SplitserveError as `generate` does."""
        async with self._counted(request.model, caller):
            model = await self.model(request.model, "", caller)
            check = partial(check_prompt_form, request, model)
            source = model.tokenizer_source
            encode = partial(self.tokenizers.encode_named, add_special_tokens=add_special_tokens)
            prompt = await encode(source, request, 0, b"", check=check, tenant=caller.tenant)
            return prompt.token_ids, model, await self.tokenizers.tokenizer(source)

    async def detokenize(self, name: str, token_ids: Sequence[int], caller: Caller) -> str:
        """The text of the token ids of the model of this name, special tokens included. Raises SplitserveError."""
        async with self._counted(name, caller):
            model = await self.model(name, "", caller)
            tokenizer = await self.tokenizers.tokenizer(model.tokenizer_source)

            def decoded() -> str:
                check_highest(max(token_ids, default=0), "tokens", model)
                return tokenizer.decode(token_ids, keep_special=True)

            return await self.tokenizers.in_turn(caller.tenant, ID_BYTES * len(token_ids), decoded)

    async def check_grammar(self, grammar: generation_pb2.Grammar, caller: Caller) -> None:
        """Raises InvalidArgumentError, as serving a request with this grammar would."""
        await self.flow.inputs.grammars.check(grammar, caller.tenant)

    async def _model_info(self, nameable: Nameable, caller: Caller) -> inference_pb2.ModelInfo:
        models, ready = nameable.models, self.routes.ready_models
        tokenizers = [await self.tokenizers.tokenizer(model.tokenizer_source) for model in models]
        versions = [
            inference_pb2.ModelVersion(name=name, weight=weight, ready=name in ready)
            for name, weight in nameable.weights.items()
        ]
        parent = models[0].base if models[0].name == nameable.name else ""
        return inference_pb2.ModelInfo(
            name=nameable.name,
            context_tokens=min(model.context_tokens for model in models),
            vocabulary_size=min(model.vocabulary_size for model in models),
            has_chat_template=all(tokenizer.has_chat_template for tokenizer in tokenizers),
            ready=any(model.name in ready for model in models),
            versions=versions,
            parent=parent if caller.may_use(parent) else "",
        )

    @asynccontextmanager
    async def _counted(self, model: str, caller: Caller) -> AsyncIterator[None]:
        """As `_admitted`, for what generates nothing: the tenant is charged a request, but no tokens."""
        tenants = self.flow.tenants
        async with self._admitted(model):
            with tenants.entered(inference_pb2.GenerateRequest(), caller) if tenants else nullcontext():
                yield

    @asynccontextmanager
    async def _admitted(self, model: str) -> AsyncIterator[None]:
        if self.draining:
            raise shutting_down()
        if self.running >= self.max_running_requests:
            self.stats.count_rejected(self.routes.largest_share(model))
            raise ResourceExhaustedError(
                f"{self.running} generations are running, which is the limit",
                reason="TOO_MANY_REQUESTS",
                retry_after_s=RETRY_AFTER_S,
            )
        running = asyncio.timeout(None)  # `end_all` sets its deadline
        self._running.add(running)
        self.idle.clear()
        try:
            async with running:
                yield
        except TimeoutError:
            if not running.expired():
                raise
            raise shutting_down() from None
        finally:
            self._running.discard(running)
            if not self._running:
                self.idle.set()


def require_admin(caller: Caller) -> None:
    """Raises PermissionDeniedError unless the caller is an admin."""
    if not caller.is_admin:
        raise PermissionDeniedError("this needs an admin key", reason="ADMIN_ONLY")


def shutting_down() -> UnavailableError:
    """The error of a request that comes or runs while the coordinator drains."""
    return UnavailableError("the coordinator is shutting down", reason="DRAINING")
