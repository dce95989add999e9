"""The life of a request. Read `RequestFlow._serve` first: reserve, prefill, stream, resume.

`InputProcessor` makes an InferenceRequest of a client's request: model resolved, fields checked, prompt tokenized.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from coordinator.admission.controller import CapacityAdmission
from coordinator.attempt import MAX_FRUITLESS_ATTEMPTS, Attempt, fruitless_attempts, is_retryable
from coordinator.health.circuit_breakers import WRONG_ROLE, CircuitBreakerRegistry
from coordinator.models.model_routes import Found, ModelRoutes
from coordinator.models.tokenizers import PromptTokenizers
from coordinator.request.inference_request import (
    Caller,
    InferenceRequest,
    RequestTrace,
    check_highest,
    check_length,
    check_names,
    check_not_longer,
    check_prompt_form,
    check_request,
    check_resume,
    check_task,
    kept_tokens,
    resolved_sampling,
    resolved_stop,
    resolved_targets,
    timeout_s,
)
from coordinator.request.sending import Output
from coordinator.request.state import Estimates, RequestState
from coordinator.request_events import RequestControl, RequestEvents
from coordinator.routing.pair_selector import PairSelector
from coordinator.routing.router import RETRY_AFTER_S, Router
from coordinator.telemetry.record_keeper import RecordKeeper
from coordinator.telemetry.request_stats import RequestStats
from coordinator.tenants.tenants import RequestQuota, Tenants
from coordinator.workers.client import BackgroundTasks, WorkerClients
from coordinator.workers.load import WorkerLoads
from coordinator.workers.registry import Registry
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import DeadlineExceededError, SplitserveError, UnavailableError
from splitserve.generation.bounds import check_prompt_logprobs
from splitserve.generation.kv_blocks import chain_salt
from splitserve.grammars.processes import GrammarProcesses
from splitserve.logs import log_context, log_event
from splitserve.models.tokenizer import TooManyTokensError
from splitserve.v1 import generation_pb2, inference_pb2


@dataclass(eq=False)
class RequestFlow:
    """Serves requests on the registered workers.

    Quotas of `tenants` are checked before a prompt is tokenized and before a request counts as demand; `admission`
    follows.
    """

    config: CoordinatorConfig
    registry: Registry
    router: Router
    clients: WorkerClients
    inputs: InputProcessor
    background: BackgroundTasks
    stats: RequestStats
    estimates: Estimates
    breakers: CircuitBreakerRegistry
    records: RecordKeeper
    admission: CapacityAdmission
    tenants: Tenants | None = None

    def __post_init__(self) -> None:
        self._loads = self.registry.loads
        self._pairs = PairSelector(self.config, self.registry, self.router, self.stats.set_without_pair)

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        output: Output,
        call_left_s: float | None = None,
        trace: RequestTrace | None = None,
        failure: SplitserveError | None = None,
    ) -> None:
        """Serves one request; see `InferenceApi.generate` for arguments and errors."""
        received_s = time.monotonic()
        state: RequestState | None = None
        check_names(request)
        request_id = request.request_id or secrets.token_hex(16)
        trace_id = trace.context.trace_id if trace is not None else ""
        with log_context(request_id=request_id, trace_id=trace_id), ExitStack() as stack:
            try:
                left_s = timeout_s(request, self.config.request_timeout_s, call_left_s)
                async with asyncio.timeout(left_s) as timer:
                    deadline_s = received_s + left_s
                    try:
                        quota = None
                        if self.tenants is not None:
                            quota = stack.enter_context(self.tenants.entered(request, caller))
                        if failure is not None:
                            raise failure
                        inference_request = await self.inputs.process(
                            request, caller, request_id, received_s, deadline_s, trace
                        )
                    except (SplitserveError, asyncio.CancelledError) as error:
                        self.records.refused(
                            request_id, request.model, caller.tenant, received_s, error, trace
                        )
                        raise
                    events = stack.enter_context(self._events_of(inference_request))
                    state = events.state
                    await self._admit(events, quota)
                    await self._serve(events, output)
            except TimeoutError:
                if not timer.expired():
                    raise
                late = _too_late(state, left_s)
                log_event("request.failed", reason=late.reason)
                raise late from None
            except SplitserveError as error:
                log_event("request.failed", reason=error.reason, error=error.message)
                raise
            except asyncio.CancelledError:
                if state is None or not state.completed:
                    log_event("request.cancelled")
                raise

    async def _serve(self, events: RequestEvents, output: Output) -> None:
        state = events.state
        while not state.finished:
            attempt = await self._next_attempt(events, output)  # a complete pair, or UNAVAILABLE
            try:
                await attempt.reserve()  # the decode worker sets KV blocks aside and returns a ticket
                attempt.start_prefill()  # the prefill worker writes KV to the decode worker under that ticket
                self._pairs.prompt_begun(state)
                self.admission.freed(state)
                while (delta := await attempt.next_delta()) is not None:
                    if state.request.prompt_only:
                        delta = delta.without_output()
                    first = state.first_token_s is None
                    events.sent(delta, time.monotonic())  # first token from prefill, the rest from decode
                    started = state.started() if first else None
                    await output.send(delta, started)
                await attempt.settle()
                self.breakers.attempt_completed(state)
            except SplitserveError as error:
                events.attempt_failed(error)
                self.breakers.attempt_failed(state, error)
                self._resume_or_raise(state, error)  # the next attempt starts from prompt + tokens sent
            finally:
                attempt.close()  # cancels prefill and aborts decode unless they have already finished
                events.attempt_ended()
                self._loads.attempt_ended(state.flight)
                self.breakers.attempt_ended(state)
        self.estimates.learn(state)
        events.completed()
        done = state.done()
        _log_completed(done)  # before the last message: the client may end the call before `send` returns
        await output.end(done)

    def _events_of(self, request: InferenceRequest) -> RequestEvents:
        now = time.monotonic()
        state = RequestState.of(request, self.estimates.of(request, now), now)
        return RequestEvents(state, self.records if self.records.enabled else None)

    async def _admit(self, events: RequestEvents, quota: RequestQuota | None) -> None:
        if quota is not None:
            quota.charge_prompt(events.state.request)
        events.control = _Control(events.state, self._loads, self.breakers, self.admission, quota)
        events.arrived(self.stats)  # requests over quota are not demand to scale for
        await self.admission.admit(events.state)
        events.state.admitted_s = time.monotonic()

    async def _next_attempt(self, events: RequestEvents, output: Output) -> Attempt:
        state = events.state
        pair = await self._pairs.route(state)  # which workers
        local_tokens = self._pairs.place(state, pair)  # who of both computes the prompt
        events.routed(pair.prefill, pair.decode, pair.cost.cached_tokens, time.monotonic(), pair.candidates)
        self._pairs.account(state, pair, local_tokens)  # it is work of theirs now
        self.breakers.attempt_began(state)
        prefill = self.clients.client_for(pair.prefill)
        decode = self.clients.client_for(pair.decode) if pair.decode else None
        targets = state.targets_left(time.monotonic())
        return Attempt(events, prefill, decode, self.background, local_tokens, targets, output)

    def _resume_or_raise(self, state: RequestState, error: SplitserveError) -> None:
        if len(state.token_ids) >= state.request.max_tokens:
            # All tokens were sent; only the final message was lost with the worker.
            state.finish_reason = generation_pb2.FINISH_REASON_LENGTH
            return
        if not is_retryable(error):
            raise error
        attempt, suspect = state.attempt, state.attempt.suspect
        if error.reason == WRONG_ROLE:
            refused_by_decode = attempt.decode is not None and attempt.decode.key == suspect
            state.other_role = attempt.decode if refused_by_decode else attempt.prefill
        else:
            state.failed_workers.add(suspect)
        brought = len(state.token_ids) - attempt.first_position
        state.fruitless_attempts = fruitless_attempts(state.fruitless_attempts, brought, error.reason)
        if state.fruitless_attempts >= MAX_FRUITLESS_ATTEMPTS:
            message = f"{error.message} (attempt {state.attempts}, {state.fruitless_attempts} in a row without a token)"
            raise UnavailableError(message, reason=error.reason, retry_after_s=RETRY_AFTER_S)
        log_event(
            "request.resumed",
            attempt=state.attempts,
            worker_id=suspect[0],
            reason=error.reason,
            sent_tokens=len(state.token_ids),
        )


@dataclass(eq=False, slots=True)
class _Control(RequestControl):
    """Updates the account of work first, then admission and breakers, which read it, then the tenant's quota."""

    state: RequestState
    loads: WorkerLoads
    breakers: CircuitBreakerRegistry
    admission: CapacityAdmission
    quota: RequestQuota | None

    @override
    def output_sent(self, tokens: int) -> None:
        first = self.loads.output(self.state.flight, tokens)  # the first tokens free capacity for prompts
        self.admission.output_sent(self.state, tokens, first)
        self.breakers.output_sent(self.state)
        if self.quota is not None:
            self.quota.output_sent(tokens)

    @override
    def decoded(self) -> None:
        self.loads.decoded(self.state.flight)
        self.admission.freed(self.state)

    @override
    def ended(self, error: BaseException | None) -> None:
        self.loads.ended(self.state.flight)
        self.admission.ended(self.state)
        if self.quota is not None:
            self.quota.ended(error)


def _too_late(state: RequestState | None, left_s: float) -> DeadlineExceededError:
    if state is None or not state.awaits_workers:
        return DeadlineExceededError(f"the generation took longer than {left_s:g} s")
    model = state.request.model.name
    message = f"model {model!r} had no workers, and the first ones were not ready within the deadline of {left_s:g} s"
    return DeadlineExceededError(message, reason="WORKERS_NOT_READY")


def _log_completed(done: inference_pb2.GenerationDone) -> None:
    log_event(
        "request.completed",
        model=done.served_by.model,
        finish_reason=generation_pb2.FinishReason.Name(done.finish_reason),
        prompt_tokens=done.usage.prompt_tokens,
        completion_tokens=done.usage.completion_tokens,
        ttft_ms=round(done.timings.ttft_ms, 3),
        tpot_ms=round(done.timings.tpot_ms, 3),
        attempts=done.served_by.attempts,
        prefill_worker=done.served_by.prefill_worker,
        decode_worker=done.served_by.decode_worker,
    )


SEED_BITS = 63


@dataclass(eq=False, slots=True)
class InputProcessor:
    """Resolves the model of a request, validates its fields and tokenizes its prompt."""

    config: CoordinatorConfig
    registry: Registry
    routes: ModelRoutes
    tokenizers: PromptTokenizers
    grammars: GrammarProcesses

    async def process(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        request_id: str,
        received_s: float,
        deadline_s: float,
        trace: RequestTrace | None = None,
    ) -> InferenceRequest:
        """The request with all defaults filled in. Both times are on the coordinator's monotonic clock.

        Raises InvalidArgumentError, NotFoundError, or UnavailableError (NO_WORKER) before any worker has registered.
        """
        key, served = request.session_id or request_id, request.resume.served_model
        resolved = await self.find_model(request.model, key, caller, served)
        model = resolved.model
        check_task(request, model)
        check_request(request, model)
        targets, slo_ttft_s = resolved_targets(request, caller, self.config.admission)
        if request.sampling.HasField("grammar"):
            await self.grammars.check(request.sampling.grammar, caller.tenant)
        bad: list[list[int]] = []
        if words := request.sampling.bad_words:
            bad = await self.tokenizers.bad_sequences(model.tokenizer_source, words, caller.tenant)
        sampling = resolved_sampling(request.sampling, secrets.randbits(SEED_BITS), bad)
        prompt_field = f"prompt.{request.WhichOneof('prompt')}"
        try:
            prompt = await self.tokenizers.encode_named(
                model.tokenizer_source,
                request,
                model.block_size_tokens,
                chain_salt(caller.cache_salt, model.adapter),
                model.context_tokens,
                check=partial(check_prompt_form, request, model),
                tenant=caller.tenant,
                add_special_tokens=not request.omit_special_tokens,
                kept=kept_tokens(request, model),
            )
        except TooManyTokensError as error:
            has = f"{prompt_field} has {error}"
            check_not_longer(error.count, has, prompt_field, model, caller.max_prompt_tokens)
            raise
        check_length(len(prompt.token_ids), prompt_field, model, caller.max_prompt_tokens)
        check_highest(prompt.highest, prompt_field, model)
        check_prompt_logprobs(request.sampling, len(prompt.token_ids))
        if model.pooling:
            stop = generation_pb2.StopParams(max_tokens=1)  # one output, without a token
        else:
            stop = resolved_stop(request.stop, len(prompt.token_ids), model, caller.max_output_tokens)
        check_resume(request.resume, stop.max_tokens)
        prompt_only = not stop.max_tokens
        stop.max_tokens = max(stop.max_tokens, 1)
        return InferenceRequest(
            request_id=request_id,
            model=model,
            prompt=prompt.token_ids,
            sampling=sampling,
            stop=stop,
            priority=request.priority,
            deadline_s=deadline_s,
            received_s=received_s,
            caller=caller,
            session_id=request.session_id,
            public_name=resolved.public_name,
            # A worker that scores the prompt computes all of it.
            block_keys=() if sampling.HasField("prompt_logprobs") else prompt.block_keys,
            resumed=tuple(request.resume.token_ids),
            resumed_finish=request.resume.finish_reason,
            trace=trace,
            targets=targets,
            slo_ttft_s=slo_ttft_s,
            prompt_only=prompt_only,
            returns_prompt=request.return_prompt_token_ids,
            pooling=request.pooling if model.pooling else None,
            second_begins=prompt.second_begins,
        )

    async def find_model(self, name: str, key: str, caller: Caller, served: str = "") -> Found:
        """Resolves a public name; `key` selects among the models of a route. `served`: the one that a request which is
        resumed began with. Waits for the first worker if needed.

        Raises NotFoundError (MODEL_NOT_FOUND) or UnavailableError (NO_WORKER).
        """
        wait_s = self.config.no_worker_wait_s
        resolved: Found | None = None
        if await self.registry.wait_until(self.registry.known_models, wait_s):
            find = partial(self.routes.find_served, name, served, caller)
            if not served:
                find = partial(self.routes.find, name, key, caller)
            resolved = await self.registry.wait_until(find, wait_s)
        if resolved is None:
            message = "no prefill and no decode worker has registered"
            raise UnavailableError(message, reason="NO_WORKER", retry_after_s=RETRY_AFTER_S)
        return resolved
