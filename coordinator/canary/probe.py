"""Sends a golden prompt to one pair of workers, without admission, routing, quotas, records and statistics."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import NamedTuple

from coordinator.attempt import Attempt
from coordinator.request.inference_request import (
    Caller,
    InferenceRequest,
    resolved_sampling,
    resolved_stop,
)
from coordinator.request.state import RequestEstimate, RequestState
from coordinator.request_events import RequestEvents
from coordinator.workers.client import BackgroundTasks, WorkerClients
from coordinator.workers.snapshot import Model, Worker
from splitserve.errors import SplitserveError
from splitserve.logs import log_context
from splitserve.v1 import generation_pb2

ANSWER_TOKENS = 8
PROBE_TIMEOUT_S = 30.0
LEAST_PRIORITY = -100
NOT_FINITE = "NAN_LOGITS"
"""Reason of an answer that ended because its logits were not finite."""


class AnswerToken(NamedTuple):
    """One token of an answer; log-probabilities in nats, `top` of the likeliest tokens at its position."""

    token_id: int
    logprob: float
    top: dict[int, float]


class Prober(NamedTuple):
    """Asks pairs of workers; a fake takes its place in unit tests."""

    clients: WorkerClients
    background: BackgroundTasks

    async def ask(self, prefill: Worker, decode: Worker, token_ids: tuple[int, ...]) -> list[AnswerToken]:
        """The greedy answer of a pair; empty if the logits were not finite.

        Raises SplitserveError or TimeoutError if the pair could not answer, which says nothing about its answers.
        """
        request = _request(prefill.model, token_ids)
        state = RequestState.of(request, RequestEstimate(ANSWER_TOKENS, 0.0), time.monotonic())
        try:
            with log_context(request_id=request.request_id, trace_id=""), RequestEvents(state) as events:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    return await self._answer(prefill, decode, events)
        except SplitserveError as error:
            if error.reason == NOT_FINITE:
                return []
            raise

    async def _answer(self, prefill: Worker, decode: Worker, events: RequestEvents) -> list[AnswerToken]:
        events.routed(prefill, decode, 0, time.monotonic())
        clients = self.clients.client_for(prefill), self.clients.client_for(decode)
        attempt = Attempt(events, *clients, self.background, 0)
        answer: list[AnswerToken] = []
        try:
            await attempt.reserve()
            attempt.start_prefill()
            while (delta := await attempt.next_delta()) is not None:
                events.sent(delta, time.monotonic())
                for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True):
                    top = {other.token_id: other.logprob for other in entry.top}
                    answer.append(AnswerToken(token_id, entry.logprob, top))
            await attempt.settle()
        finally:
            attempt.close()
            events.attempt_ended()
        return answer


def _request(model: Model, token_ids: tuple[int, ...]) -> InferenceRequest:
    now = time.monotonic()
    sampling = generation_pb2.SamplingParams(temperature=0.0, logprobs=20)
    stop = generation_pb2.StopParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return InferenceRequest(
        request_id=f"canary-{secrets.token_hex(6)}",
        model=model,
        prompt=token_ids,
        sampling=resolved_sampling(sampling, seed=0),
        stop=resolved_stop(stop, len(token_ids), model),
        priority=LEAST_PRIORITY,
        deadline_s=now + PROBE_TIMEOUT_S,
        received_s=now,
        # Each probe has its own salt: cached KV would hide errors in newly computed KV.
        caller=Caller("canary", cache_salt=secrets.token_bytes(32), priority_class="batch"),
    )
