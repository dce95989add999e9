"""The life of a request. Read `RequestFlow._serve` first: reserve, prefill, stream, resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack

from coordinator.attempt import Attempt, is_retryable
from coordinator.attempt_state import MAX_FRUITLESS_ATTEMPTS, fruitless_attempts
from coordinator.background_tasks import BackgroundTasks
from coordinator.health.breaker_registry import CircuitBreakerRegistry
from coordinator.input_processor import InputProcessor
from coordinator.metrics.recorder import StatsRecorder
from coordinator.metrics.stats import RequestStats
from coordinator.peer_fetch.fetcher import PrefixFetcher
from coordinator.peer_fetch.handoff_watch import HandoffWatch
from coordinator.records.record_keeper import RecordKeeper
from coordinator.records.traffic import TrafficRecorder
from coordinator.request.caller import Caller
from coordinator.request.estimates import Estimates
from coordinator.request.ids import random_hex
from coordinator.request.inference_request import InferenceRequest, check_names, timeout_s
from coordinator.request.observer import AdmissionPlugin, QuotaPlugin, RequestEvents, RequestObserver
from coordinator.request.request_trace import RequestTrace
from coordinator.request.sending import DirectSend, Send
from coordinator.request.service_targets import targets_of
from coordinator.request.state import RequestState
from coordinator.routing.first_workers import FirstWorkers
from coordinator.routing.pair_selector import PairSelector
from coordinator.routing.router import RETRY_AFTER_S, Router
from coordinator.workers.clients import WorkerClients
from coordinator.workers.registry import Registry
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import DeadlineExceededError, SplitserveError, UnavailableError
from splitserve.logs import log_context, log_event
from splitserve.v1 import generation_pb2, inference_pb2


class RequestFlow:
    """Serves requests on the registered workers.

    `quota_plugins` are asked before a prompt is tokenized, and again before a request counts as demand;
    `capacity_plugins` after it. `observers` are told of every request, after its own.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        registry: Registry,
        router: Router,
        clients: WorkerClients,
        inputs: InputProcessor,
        background: BackgroundTasks,
        stats: RequestStats,
        estimates: Estimates,
        breakers: CircuitBreakerRegistry,
        records: RecordKeeper,
        traffic: TrafficRecorder,
        fetcher: PrefixFetcher | None,
        capacity_plugins: Sequence[AdmissionPlugin] = (),
        quota_plugins: Sequence[QuotaPlugin] = (),
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        self._config = config
        self._inputs = inputs
        self._clients, self._fetcher = clients, fetcher
        self._background = background
        self._stats = stats
        self._estimates = estimates
        self._capacity_plugins = capacity_plugins
        self._quota_plugins = quota_plugins
        first_workers = FirstWorkers(config.admission, registry, stats.set_without_pair)
        offers = (fetcher.offer,) if fetcher is not None else ()
        self._pairs = PairSelector(config, registry, router, first_workers, *offers)
        self._records, self._traffic = records, traffic
        kept = (records,) if records.enabled else ()
        watches = (HandoffWatch(fetcher.times),) if fetcher is not None else ()
        self._observers: Sequence[RequestObserver] = (estimates, breakers, *watches, *kept, *observers)

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        send: Send,
        call_left_s: float | None = None,
        trace: RequestTrace | None = None,
        direct: DirectSend | None = None,
    ) -> None:
        """Serves one request; see `InferenceApi.generate` for arguments and errors."""
        received_s = time.monotonic()
        state: RequestState | None = None
        check_names(request)
        request_id = request.request_id or random_hex()
        trace_id = trace.context.trace_id if trace is not None else ""
        with log_context(request_id=request_id, trace_id=trace_id), ExitStack() as stack:
            try:
                left_s = timeout_s(request, self._config.request_timeout_s, call_left_s)
                async with asyncio.timeout(left_s) as timer:
                    deadline_s = received_s + left_s
                    try:
                        quotas = [
                            stack.enter_context(p.entered(request, caller)) for p in self._quota_plugins
                        ]
                        inference_request = await self._inputs.process(
                            request, caller, request_id, received_s, deadline_s, trace
                        )
                    except (SplitserveError, asyncio.CancelledError) as error:
                        self._records.refused(
                            request_id, request.model, caller.tenant, received_s, error, trace
                        )
                        raise
                    events = stack.enter_context(self._events_of(inference_request))
                    state = events.state
                    await self._admit(events, quotas)
                    await self._serve(events, send, direct)
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

    async def _serve(self, events: RequestEvents, send: Send, direct: DirectSend | None) -> None:
        state = events.state
        while not state.finished:
            attempt = await self._next_attempt(events, direct)  # a complete pair, or UNAVAILABLE
            try:
                await attempt.reserve()  # the decode worker sets KV blocks aside and returns a ticket
                attempt.start_prefill()  # the prefill worker writes KV to the decode worker under that ticket
                while (delta := await attempt.next_delta()) is not None:
                    first = state.first_token_s is None
                    events.sent(delta, time.monotonic())  # first token from prefill, the rest from decode
                    started = state.started() if first else None
                    await send(inference_pb2.GenerateResponse(delta=delta, started=started))
                await attempt.settle()
                events.emit(RequestObserver.attempt_completed)
            except SplitserveError as error:
                events.attempt_failed(error)
                self._resume_or_raise(state, error)  # the next attempt starts from prompt + tokens sent
            finally:
                attempt.close()  # cancels prefill and aborts decode unless they have already finished
                events.attempt_ended()
        events.completed()
        done = state.done()
        _log_completed(done)  # first: who has the last message may end the call before `send` returns
        await send(inference_pb2.GenerateResponse(done=done))

    def _events_of(self, request: InferenceRequest) -> RequestEvents:
        now = time.monotonic()
        state = RequestState.of(request, self._estimates.of(request, now), now)
        recorded = (self._traffic,) if self._traffic.is_wanted else ()
        pairs = self._pairs.observers_of(request)
        return RequestEvents(state, (StatsRecorder(self._stats), *pairs, *self._observers, *recorded))

    async def _admit(self, events: RequestEvents, quotas: Sequence[AdmissionPlugin]) -> None:
        for quota in quotas:
            await quota.admit(events)
        events.emit(RequestObserver.arrived)  # requests over quota are not demand to scale for
        for plugin in self._capacity_plugins:
            await plugin.admit(events)
        events.admitted(time.monotonic())

    async def _next_attempt(self, events: RequestEvents, direct: DirectSend | None) -> Attempt:
        pair = await self._pairs.select(events.state)
        prefill = self._clients.client_for(pair.prefill)
        decode = self._clients.client_for(pair.decode) if pair.decode else None
        fetch = self._fetcher.plan(events.state, pair) if self._fetcher is not None else None
        for_prefill = fetch is not None and fetch.taker.key == pair.prefill.key
        cached_tokens = fetch.tokens if fetch is not None and for_prefill else pair.cost.cached_tokens
        events.routed(pair.prefill, pair.decode, cached_tokens, time.monotonic(), pair.candidates)
        if fetch is not None and self._fetcher is not None:
            try:
                await self._fetcher.fetch(fetch, events)  # if it fails, the prompt is computed
            except BaseException:
                events.attempt_ended()
                raise
        local_tokens, now = self._pairs.local_prefill_tokens(events.state, pair), time.monotonic()
        if for_prefill and not pair.is_own and events.state.attempt.has_fetched:
            local_tokens = 0  # the prefix is where the prompt is to be computed
        targets = targets_of(events.state, now) if events.state.request.targets is not None else None
        return Attempt(events, prefill, decode, self._background, local_tokens, targets, direct)

    def _resume_or_raise(self, state: RequestState, error: SplitserveError) -> None:
        if len(state.token_ids) >= state.request.max_tokens:
            # All tokens were sent; only the final message was lost with the worker.
            state.finish_reason = generation_pb2.FINISH_REASON_LENGTH
            return
        if not is_retryable(error):
            raise error
        suspect = state.attempt.suspect
        state.failed_workers.add(suspect)
        brought = len(state.token_ids) - state.attempt.first_position
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
