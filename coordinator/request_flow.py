"""The life of a request. Read `_serve` first: it is all of it on one screen."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TypeVar

from coordinator.answer import Answer
from coordinator.attempt import Attempt, is_retryable
from coordinator.background import Background
from coordinator.caller import Caller
from coordinator.circuits import Circuits
from coordinator.gates import Gate, Passage, pass_gates
from coordinator.grammar_check import GrammarCheck
from coordinator.local_prefill import NO_LIMIT, HandoffMeter, facts_of_pair, local_prefill_tokens
from coordinator.model_routes import Found, ModelRoutes
from coordinator.prompt import PromptTokenizers
from coordinator.random_pool import random_bits, random_hex
from coordinator.registry import Registry
from coordinator.request_record import RequestRecord
from coordinator.request_validation import (
    Generation,
    check_prompt,
    check_request,
    resolved_sampling,
    resolved_stop,
    timeout_s,
)
from coordinator.route_planner import RoutePlanner
from coordinator.routing import Pair, Router, RouteRequest, no_pair
from coordinator.signal_book import SignalBook
from coordinator.worker_links import WorkerLinks
from splitserve.config import CoordinatorConfig
from splitserve.errors import DeadlineExceededError, SplitserveError, UnavailableError
from splitserve.logs import log_event, request_context
from splitserve.v1 import generation_pb2, inference_pb2

MAX_ATTEMPTS = 3
SAME_WORKER_AGAIN_S = 0.25
"""How long a resume looks for other workers than those that failed, before it settles for the same."""
RETRY_AFTER_S = 1.0
SEED_BITS = 63

Send = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]
T = TypeVar("T")


class RequestFlow:
    """Runs requests against the workers of the registry."""

    def __init__(
        self,
        config: CoordinatorConfig,
        registry: Registry,
        router: Router,
        links: WorkerLinks,
        tokenizers: PromptTokenizers,
        background: Background,
        book: SignalBook,
        routes: ModelRoutes,
        circuits: Circuits,
        gates: Sequence[Gate] = (),
        quotas: Sequence[Gate] = (),
    ) -> None:
        self._config = config
        self._routes = routes
        self._circuits = circuits
        self._registry = registry
        self._router = router
        self._links = links
        self._tokenizers = tokenizers
        self._background = background
        self._planner = RoutePlanner(registry)
        self._meter = HandoffMeter()
        self._book = book
        self._gates = gates
        self._quotas = quotas
        self._grammars = GrammarCheck()

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        send: Send,
        call_left_s: float | None = None,
    ) -> None:
        """See `FrontDoor.generate`."""
        received_s = time.monotonic()
        request_id = request.request_id or random_hex()
        with request_context(request_id), RequestRecord(self._book, received_s) as record:
            try:
                left_s = timeout_s(request, self._config.request_timeout_s, call_left_s)
                async with asyncio.timeout(left_s) as timer:
                    deadline_s = received_s + left_s
                    generation = await self._receive(request, caller, request_id, received_s, deadline_s)
                    async with AsyncExitStack() as stay:
                        charged = await pass_gates(stay, self._quotas, generation)
                        record.arrived(generation)  # what is over a quota is no demand to scale for
                        passages = await pass_gates(stay, self._gates, generation)
                        await self._serve(generation, send, record, [*charged, *passages])
            except TimeoutError:
                if not timer.expired():
                    raise
                log_event("request.failed", reason=DeadlineExceededError.default_reason)
                raise DeadlineExceededError(f"the generation took longer than {left_s:g} s") from None
            except SplitserveError as error:
                log_event("request.failed", reason=error.reason, error=error.message)
                raise
            except asyncio.CancelledError:
                log_event("request.cancelled")
                raise

    async def _serve(
        self, generation: Generation, send: Send, record: RequestRecord, passages: Sequence[Passage]
    ) -> None:
        answer = Answer(generation)
        for passage in passages:
            record.passed(passage.waits)
        while not answer.finished:
            attempt = await self._next_attempt(answer, record, passages)  # a complete pair, or UNAVAILABLE
            try:
                with self._circuits.judging(attempt) as judged:  # blames who failed, pauses who fails often
                    await attempt.reserve()  # decode sets KV blocks aside: the ticket
                    attempt.start_prefill()  # KV is written from worker to worker under that ticket
                    while (delta := await attempt.next_delta()) is not None:
                        answer.append(delta, time.monotonic())  # prefill's first token, the rest from decode
                        judged.delta_came()
                        record.sent(answer)
                        for passage in passages:
                            passage.sent(len(delta.token_ids))
                        await send(inference_pb2.GenerateResponse(delta=delta))
                    await attempt.settle()
            except SplitserveError as error:
                self._resume_or_raise(answer, attempt, error)  # goes on with prompt + tokens sent so far
            finally:
                attempt.close()  # cancels prefill, aborts at decode, whatever has not ended by itself
                answer.note_attempt(attempt.report)
                self._meter.record(attempt.report)
        record.completed(answer)
        self._planner.ended(answer)
        done = answer.done()
        await send(inference_pb2.GenerateResponse(done=done))
        _log_completed(done)

    async def _receive(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        request_id: str,
        received_s: float,
        deadline_s: float,
    ) -> Generation:
        """Checks and tokenizes."""
        found = await self._find_model(request.model, request.session_id or request_id, caller)
        model = found.model
        check_request(request, model)
        await self._grammars.check(request.sampling)
        block_size = model.block_size_tokens if self._config.routing == "prefix" else 0
        token_ids, block_keys = await self._tokenizers.encode_named(
            model.tokenizer_source, request, block_size, caller.cache_salt
        )
        prompt_field = f"prompt.{request.WhichOneof('prompt')}"
        check_prompt(token_ids, prompt_field, model, caller.max_prompt_tokens)
        return Generation(
            request_id=request_id,
            model=model,
            prompt=tuple(token_ids),
            sampling=resolved_sampling(request.sampling, seed=random_bits(SEED_BITS)),
            stop=resolved_stop(request.stop, len(token_ids), model, caller.max_output_tokens),
            priority=request.priority,
            deadline_s=deadline_s,
            received_s=received_s,
            caller=caller,
            session_id=request.session_id,
            public_name=found.public_name,
            block_keys=block_keys,
        )

    async def _find_model(self, name: str, key: str, caller: Caller) -> Found:
        """The model behind that name, for the caller and this key. Before any worker has registered, waits for one."""
        wait_s = self._config.no_worker_wait_s
        found: Found | None = None
        if await self._once_true(self._registry.known_models, wait_s):
            found = await self._once_true(lambda: self._routes.find(name, key, caller), wait_s)
        if found is None:
            message = "no prefill and no decode worker has registered"
            raise UnavailableError(message, reason="NO_WORKER", retry_after_s=RETRY_AFTER_S)
        return found

    async def _next_attempt(
        self, answer: Answer, record: RequestRecord, passages: Sequence[Passage]
    ) -> Attempt:
        pair = await self._route(answer)
        prefill = self._links.link_to(pair.prefill)
        decode = self._links.link_to(pair.decode) if pair.decode else None
        answer.attempts += 1
        record.chosen(pair.prefill, pair.decode)
        for passage in passages:
            passage.routed(pair.prefill.key, pair.decode.key if pair.decode else None)
        self._planner.sent(answer, pair)
        local_tokens = self._local_prefill_tokens(answer, pair)
        return Attempt(answer, prefill, decode, self._background, record, local_tokens, passages)

    def _local_prefill_tokens(self, answer: Answer, pair: Pair) -> int:
        """How many prompt tokens the decode worker may compute itself; see CoordinatorConfig. A plan may lend it."""
        now = time.monotonic()
        self._meter.arrived(now)
        mode, lent = self._config.local_prefill, self._registry.plan.lends(now)
        if pair.decode is None or (mode == "never" and not lent):
            return 0
        if mode == "always":
            return NO_LIMIT
        tokens = len(answer.generation.prompt) + len(answer.token_ids) - pair.parts.cached_tokens
        request = RouteRequest(answer.generation.model.name, tokens)
        return local_prefill_tokens(
            facts_of_pair(pair.prefill, pair.decode, request, self._meter, pair.decode_candidates, now)
        )

    async def _route(self, answer: Answer) -> Pair:
        """A pair for the next attempt, if possible without the workers that have failed this request."""
        wanted = self._planner.request_for(answer)
        wait_s = self._config.no_worker_wait_s
        pair: Pair | None = None
        if answer.failed_workers:
            others = dataclasses.replace(wanted, exclude=frozenset(answer.failed_workers))
            settle_s = min(SAME_WORKER_AGAIN_S, wait_s)
            pair = await self._once_true(lambda: self._choose(others), settle_s)
        pair = pair or await self._once_true(lambda: self._choose(wanted), wait_s)
        if pair is None:
            raise no_pair(self._registry.snapshot(), wanted, RETRY_AFTER_S)
        return pair

    def _choose(self, request: RouteRequest) -> Pair | None:
        return self._router.choose_pair(self._registry.snapshot(), request, time.monotonic())

    async def _once_true(self, probe: Callable[[], T], wait_s: float) -> T:
        """What `probe` gives as soon as it is true, tried at each change of the registry; else its last."""
        deadline_s = time.monotonic() + wait_s
        while True:
            version, found = self._registry.version, probe()
            left_s = deadline_s - time.monotonic()
            if found or left_s <= 0:
                return found
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._registry.wait_change(version)

    def _resume_or_raise(self, answer: Answer, attempt: Attempt, error: SplitserveError) -> None:
        if len(answer.token_ids) >= answer.generation.max_tokens:
            # Only the end itself was lost with the worker.
            answer.finish_reason = generation_pb2.FINISH_REASON_LENGTH
            return
        if not is_retryable(error):
            raise error
        answer.failed_workers.add(attempt.culprit)
        if answer.attempts >= MAX_ATTEMPTS:
            message = f"{error.message} (attempt {answer.attempts} of {MAX_ATTEMPTS})"
            raise UnavailableError(message, reason=error.reason, retry_after_s=RETRY_AFTER_S)
        log_event(
            "request.resumed",
            attempt=answer.attempts,
            worker_id=attempt.culprit[0],
            reason=error.reason,
            sent_tokens=len(answer.token_ids),
        )


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
