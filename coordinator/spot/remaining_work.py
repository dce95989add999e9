"""What requests still need of a worker, from their states and its last report. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from coordinator.request.state import RequestState
from coordinator.spot.move_plan import RemainingWork
from coordinator.workers.snapshot import Worker

PROMPT_SPREAD = 2.0
"""A prompt may take so many times as long as predicted: other coordinators send some, too."""


def works_on(worker: Worker, states: Iterable[RequestState]) -> list[RemainingWork]:
    """Of the running attempts, those that need this worker, with what they need of it."""
    found: list[RemainingWork] = []
    prompts: list[RequestState] = []
    for state in states:
        attempt = state.attempt
        if attempt.decode is not None and attempt.decode.key == worker.key:
            found.append(_answer(worker, state))
        elif attempt.prefill.key == worker.key and not attempt.is_local and not attempt.report.decode_worker:
            prompts.append(state)
    prompts.sort(key=lambda state: state.attempt.prefilling_s or math.inf)
    rate, tokens = worker.load.prefill_tokens_per_second, 0.0
    for state in prompts:
        attempt = state.attempt
        if attempt.prefilling_s is None:
            # The worker will refuse it.
            found.append(RemainingWork(attempt.attempt_id, math.inf, math.inf))
            continue
        if attempt.prefilled_s is None:
            tokens += max(
                0, len(state.request.prompt) + attempt.first_position - attempt.expected_cached_tokens
            )
        expected_s = tokens / rate if rate else math.inf
        found.append(RemainingWork(attempt.attempt_id, expected_s, PROMPT_SPREAD * expected_s))
    return found


def _answer(worker: Worker, state: RequestState) -> RemainingWork:
    attempt, sent = state.attempt, len(state.token_ids)
    if attempt.prefilling_s is None and not attempt.is_local:
        return RemainingWork(attempt.attempt_id, math.inf, math.inf)  # it waits for blocks: nothing is lost
    token_s = max(worker.load.decode_step_ms / 1e3, state.tpot_s)
    if not token_s:
        return RemainingWork(attempt.attempt_id, math.inf, math.inf)
    most = state.request.max_tokens - sent
    # One that is longer than usual already may become as long as it may.
    usual = min(most, state.estimate.output_tokens - sent) if state.estimate.output_tokens > sent else most
    return RemainingWork(attempt.attempt_id, usual * token_s, most * token_s)
