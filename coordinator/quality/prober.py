"""Sends a golden prompt to one target, past admission, routing, quotas, records and statistics."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Protocol

from coordinator.attempt import Attempt
from coordinator.attempt_state import AttemptState
from coordinator.background_tasks import BackgroundTasks
from coordinator.quality.golden_answer import GoldenAnswer, GoldenToken
from coordinator.quality.target import Target
from coordinator.request.caller import Caller
from coordinator.request.ids import random_hex
from coordinator.request.inference_request import InferenceRequest, resolved_sampling, resolved_stop
from coordinator.request.observer import RequestEvents
from coordinator.request.state import RequestEstimate, RequestState
from coordinator.routing.local_prefill import NO_LIMIT
from coordinator.workers.catalog import Model
from coordinator.workers.clients import WorkerClients
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.logs import log_context
from splitserve.v1 import generation_pb2

ANSWER_TOKENS = 8
TOP_LOGPROBS = 20
"""The most that a worker reports: they hold nearly all of the probability at most positions."""
PROBE_TIMEOUT_S = 30.0
CALLER = "quality-watch"
SALT_BYTES = 32
LEAST_PRIORITY = -100
NOT_FINITE = "NAN_LOGITS"
"""Reason of an answer that ended because its logits were not finite."""


@dataclass(frozen=True, slots=True)
class GoldenPrompt:
    """One prompt in a model's tokens. `number` is that of its text."""

    number: int
    model: Model
    token_ids: tuple[int, ...]


class Prober(Protocol):
    """Asks targets; a fake in unit tests."""

    async def ask(self, target: Target, prompt: GoldenPrompt) -> GoldenAnswer | None:
        """The target's answer, greedily decoded; None if it ended because its logits were not finite.

        Raises SplitserveError if the target could not answer, which says nothing about its quality.
        """


class WorkerProber:
    """The Prober of a running coordinator."""

    def __init__(self, registry: Registry, clients: WorkerClients, background: BackgroundTasks) -> None:
        self._registry = registry
        self._clients = clients
        self._background = background

    async def ask(self, target: Target, prompt: GoldenPrompt) -> GoldenAnswer | None:
        """See Prober."""
        state = RequestState.of(_request(prompt), RequestEstimate(ANSWER_TOKENS, 0.0), time.monotonic())
        try:
            with (
                log_context(request_id=state.request.request_id, trace_id=""),
                RequestEvents(state) as events,
            ):
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    return await self._answer(target, events)
        except TimeoutError:
            raise UnavailableError(
                f"no answer within {PROBE_TIMEOUT_S:g} s", reason="PROBE_TIMEOUT"
            ) from None
        except SplitserveError as error:
            if error.reason == NOT_FINITE:
                return None
            raise

    async def _answer(self, target: Target, events: RequestEvents) -> GoldenAnswer:
        prefill, decode = self._workers(target)
        events.routed(prefill, decode, 0, time.monotonic())
        clients = self._clients.client_for(prefill), self._clients.client_for(decode)
        attempt = Attempt(events, *clients, self._background, 0 if target.prefill else NO_LIMIT)
        answer: list[GoldenToken] = []
        try:
            await attempt.reserve()
            if target.prefill is None and attempt.state is not AttemptState.LOCAL:
                raise UnavailableError(f"{decode.name} does not compute prompts", reason="NO_LOCAL_PREFILL")
            attempt.start_prefill()
            while (delta := await attempt.next_delta()) is not None:
                events.sent(delta, time.monotonic())
                answer += _tokens(delta)
            await attempt.settle()
        finally:
            attempt.close()
            events.attempt_ended()
        return tuple(answer)

    def _workers(self, target: Target) -> tuple[Worker, Worker]:
        """The target's workers. A decode worker alone still needs one that would write, as in any attempt; a neutral
        one is that itself."""
        decode = self._registry.get(target.decode)
        prefill = self._registry.get(target.prefill) if target.prefill else None
        if target.prefill is None and decode is not None and decode.neutral:
            prefill = decode
        elif target.prefill is None and decode is not None:
            workers = self._registry.snapshot().workers
            prefill = next(
                (
                    w
                    for w in workers
                    if w.computes_prompts and decode.agent_id in w.connected_agents and w.usable
                ),
                None,
            )
        if prefill is None or decode is None:
            raise UnavailableError("a worker of the target went away", reason="WORKER_LOST")
        return prefill, decode


def _request(prompt: GoldenPrompt) -> InferenceRequest:
    now = time.monotonic()
    sampling = generation_pb2.SamplingParams(temperature=0.0, logprobs=TOP_LOGPROBS)
    stop = generation_pb2.StopParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return InferenceRequest(
        request_id=f"quality-{random_hex(12)}",
        model=prompt.model,
        prompt=prompt.token_ids,
        sampling=resolved_sampling(sampling, seed=0),
        stop=resolved_stop(stop, len(prompt.token_ids), prompt.model),
        priority=LEAST_PRIORITY,
        deadline_s=now + PROBE_TIMEOUT_S,
        received_s=now,
        # A salt of its own for each probe: KV that a worker has cached would hide what is wrong with this one's.
        caller=Caller(CALLER, cache_salt=secrets.token_bytes(SALT_BYTES), priority_class="batch"),
    )


def _tokens(delta: generation_pb2.OutputDelta) -> list[GoldenToken]:
    tops = [{top.token_id: top.logprob for top in logprob.top} for logprob in delta.logprobs]
    tops += [{}] * (len(delta.token_ids) - len(tops))
    return [GoldenToken(token_id, top) for token_id, top in zip(delta.token_ids, tops, strict=True)]
