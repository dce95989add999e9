"""The circuit breakers of all workers and pairs. The request flow tells them of attempts.

closed -> open       after `consecutive_failures`
open -> half-open    after `open_s`, doubled up to `max_open_s` for each relapse
half-open -> closed  when the one probe request that is let through gets a response
half-open -> open    when the probe fails

Requests that began before the breaker opened do not count afterwards.

An open breaker ejects its worker, or its pair of workers, from routing, but never the last one: if the breakers of all
workers of a pool are open, all of them stay; if no complete pair would be left, first pairs and then workers are
readmitted. A request that may fail is better than one that is not served, since it is retried elsewhere anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from coordinator.request.state import AttemptRecord, RequestState
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import (
    CLOSED_CIRCUIT,
    CircuitState,
    CircuitStatus,
    PoolSnapshot,
    Worker,
    WorkerKey,
)
from splitserve.config.coordinator import CircuitBreakerConfig
from splitserve.errors import ERROR_BY_CODE, SplitserveError, UnavailableError
from splitserve.logs import log_event

FailedPart = Literal["worker", "pair"]

MOVED = "WORKER_PREEMPTED"
"""Reason of an attempt that ended because the machine of its worker is taken away."""
WRONG_ROLE = "WRONG_ROLE"
"""Reason of a worker that refuses a request of a pool that it has just left. Its next report has the new role."""
NO_FAILURES = frozenset({MOVED, WRONG_ROLE})
"""Reasons of attempts that end without a failure: the request resumes elsewhere."""

PAIR_REASONS = frozenset(
    {"TRANSFER_FAILED", "PEER_LOST", "UNKNOWN_PEER", "COMPLETION_LOST", "CHECKSUM_MISMATCH"}
)
"""Reasons of failed handoffs. Each of both workers may work well with another peer."""
NOT_COUNTED_REASONS = NO_FAILURES | {"DRAINING"}
NOT_COUNTED = tuple(kind for kind in ERROR_BY_CODE.values() if kind is not UnavailableError)
"""Errors caused by the request itself, its cancellation, or load, which do not count against a worker."""


def failed_part(error: SplitserveError) -> FailedPart | None:
    """The part at fault for an attempt's error: the suspect worker, the pair, or neither (None)."""
    if error.reason in PAIR_REASONS:
        return "pair"
    if isinstance(error, NOT_COUNTED) or error.reason in NOT_COUNTED_REASONS:
        return None
    return "worker"


class CircuitBreaker:
    """The breaker of one boot of a worker, or of one pair. Times are in seconds on the monotonic clock."""

    def __init__(self, policy: CircuitBreakerConfig) -> None:
        self.state: CircuitState = "closed"
        self.half_open_s = 0.0
        """When an open breaker becomes half-open."""
        self._policy = policy
        self._probe: str | None = None
        self._opened_s = self._closed_s = float("-inf")
        self._openings = 0
        self._consecutive = 0

    @property
    def admits(self) -> bool:
        """Whether a request may be sent now."""
        return self.state == "closed" or (self.state == "half-open" and self._probe is None)

    def tick(self, now: float) -> None:
        """Makes an open breaker half-open once it is due."""
        if self.state == "open" and now >= self.half_open_s:
            self.state, self._probe = "half-open", None

    def began(self, attempt_id: str) -> None:
        """Takes notice of a new attempt. While half-open, the first one is the probe."""
        if self.state == "half-open" and self._probe is None:
            self._probe = attempt_id

    def release(self, attempt_id: str) -> None:
        """Takes notice of an attempt's end. If it was the probe and had no result, another attempt may be the probe."""
        if self._probe == attempt_id:
            self._probe = None

    def responded(self, began_s: float, now: float) -> None:
        """Takes notice of an attempt's output, which closes the breaker, whatever happens to the attempt later."""
        if self.state != "closed" and began_s >= self._opened_s:
            self.state, self._probe, self._closed_s = "closed", None, now

    def succeeded(self, began_s: float, now: float) -> None:
        """Takes notice of a completed attempt."""
        self.responded(began_s, now)
        if self.state == "closed" and began_s >= self._opened_s:
            self._consecutive = 0

    def failed(self, began_s: float, now: float) -> None:
        """Counts an attempt that failed through the fault of this worker or pair."""
        if began_s < self._opened_s or self.state == "open":
            return
        self._consecutive += 1
        if self.state == "half-open" or self._consecutive >= self._policy.consecutive_failures:
            self._open(now)

    def _open(self, now: float) -> None:
        relapsed = self.state == "half-open" or now - self._closed_s < self._policy.window_s
        self._openings = self._openings + 1 if relapsed else 1
        rest_s = min(self._policy.max_open_s, self._policy.open_s * 2.0 ** min(self._openings - 1, 64))
        self.state, self._probe, self._opened_s, self.half_open_s = "open", None, now, now + rest_s
        self._consecutive = 0


BreakerKey = tuple[WorkerKey, ...]
"""(worker,) or (prefill worker, decode worker)."""


class CircuitBreakerRegistry:
    """All breakers. Each exists from the first failure of its key until one of the key's workers is gone."""

    def __init__(self, registry: Registry, policy: CircuitBreakerConfig) -> None:
        self._registry = registry
        self._policy = policy
        self._breakers: dict[BreakerKey, CircuitBreaker] = {}

    def attempt_began(self, state: RequestState) -> None:
        """Makes the attempt the probe of its half-open breakers."""
        breakers = self._breakers_of(state.attempt)
        for breaker in breakers:
            breaker.began(state.attempt.attempt_id)
        self._apply_if(any(breaker.state == "half-open" for breaker in breakers))

    def output_sent(self, state: RequestState) -> None:
        """Closes the half-open breakers of the attempt once all its workers have sent output."""
        if self._breakers and state.attempt.all_workers_responded:
            self._on_response(state.attempt, completed=False)

    def attempt_completed(self, state: RequestState) -> None:
        """Counts the success of an attempt whose output was sent completely."""
        self._on_response(state.attempt, completed=True)

    def attempt_failed(self, state: RequestState, error: SplitserveError) -> None:
        """Counts the failure for the worker or pair at fault."""
        attempt, part = state.attempt, failed_part(error)
        pair = attempt.pair
        key: BreakerKey | None = pair if part == "pair" else (attempt.suspect,) if part == "worker" else None
        if not self._policy.enabled or key is None:
            return
        breaker = self._breakers.setdefault(key, CircuitBreaker(self._policy))
        before = breaker.state
        breaker.failed(attempt.began_s, time.monotonic())
        if breaker.state == "open" and before != "open":
            names = [worker_id for worker_id, _ in key]
            rest_s = round(breaker.half_open_s - time.monotonic(), 3)
            log_event("circuit.opened", workers=names, reason=error.reason, half_open_in_s=rest_s)
        self._apply_if(breaker.state != before)

    def attempt_ended(self, state: RequestState) -> None:
        """Releases the probe of an attempt that is over. Call it last."""
        breakers = self._breakers_of(state.attempt)
        for breaker in breakers:
            breaker.release(state.attempt.attempt_id)
        self._apply_if(any(breaker.state == "half-open" for breaker in breakers))

    def _breakers_of(self, attempt: AttemptRecord) -> list[CircuitBreaker]:
        pair = attempt.pair
        keys = {*((key,) for key in pair), pair}
        return [breaker for breaker in map(self._breakers.get, keys) if breaker is not None]

    async def run(self) -> None:
        """Makes open breakers half-open when due and drops those of removed workers, until cancelled."""
        while True:
            self._tick(time.monotonic())
            version = self._registry.version
            due = [breaker.half_open_s for breaker in self._breakers.values() if breaker.state == "open"]
            left_s = max(0.0, min(due) - time.monotonic()) if due else None
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._registry.wait_change(version)

    def _tick(self, now: float) -> None:
        registered = {worker.key for worker in self._registry.snapshot().workers}
        for key in [key for key in self._breakers if not registered.issuperset(key)]:
            del self._breakers[key]
        for breaker in self._breakers.values():
            breaker.tick(now)
        self._apply()

    def _on_response(self, attempt: AttemptRecord, *, completed: bool) -> None:
        """Counts output, or all of it (`completed`), as a success for every worker and pair that took part."""
        now, changed = time.monotonic(), False
        for key in attempt.responsive_parts:
            breaker = self._breakers.get(key)
            if breaker is None:
                continue
            before = breaker.state
            if completed:
                breaker.succeeded(attempt.began_s, now)
            else:
                breaker.responded(attempt.began_s, now)
            if breaker.state != before:
                changed = True
                log_event("circuit.closed", workers=[worker_id for worker_id, _ in key])
        self._apply_if(changed)

    def _apply_if(self, changed: bool) -> None:
        if changed:
            self._apply()

    def _apply(self) -> None:
        snapshot = self._registry.snapshot()
        if self._breakers or any(worker.circuit is not CLOSED_CIRCUIT for worker in snapshot.workers):
            self._registry.set_circuit_statuses(circuit_statuses(snapshot, self._breakers))


def circuit_statuses(
    snapshot: PoolSnapshot, breakers: Mapping[BreakerKey, CircuitBreaker]
) -> dict[WorkerKey, CircuitStatus]:
    """The status of each worker of the snapshot with a breaker that is not closed. Pure."""
    blocked = {key for key, breaker in breakers.items() if not breaker.admits}
    ejected: list[WorkerKey] = []
    ejected_pairs: list[BreakerKey] = []
    for model in snapshot.models():
        workers, worker_pairs = _ejections(snapshot, model, blocked)
        ejected += workers
        ejected_pairs += worker_pairs
    by_agent = {worker.key: worker.agent_id for worker in snapshot.workers}
    statuses: dict[WorkerKey, CircuitStatus] = {}
    for worker in snapshot.workers:
        own = breakers.get((worker.key,))
        pairs = tuple(
            (by_agent[key[1]], breaker.state)
            for key, breaker in breakers.items()
            if len(key) == 2 and key[0] == worker.key and breaker.state != "closed" and key[1] in by_agent
        )
        circuit = CircuitStatus(
            state=own.state if own else "closed",
            tripped=worker.key in ejected,
            pairs=pairs,
            ejected_agents=frozenset(
                by_agent[decode] for prefill, decode in ejected_pairs if prefill == worker.key
            ),
        )
        if circuit != CLOSED_CIRCUIT:
            statuses[worker.key] = circuit
    return statuses


def _ejections(
    snapshot: PoolSnapshot, model: str, blocked: set[BreakerKey]
) -> tuple[list[WorkerKey], list[BreakerKey]]:
    """The workers and pairs of a model to eject: those in `blocked`, as far as a complete pair remains."""
    workers = [
        replace(worker, circuit=CLOSED_CIRCUIT) for worker in snapshot.workers if worker.model.name == model
    ]
    ejected: list[WorkerKey] = []
    for pool in ("prefill", "decode"):
        accepting = [worker for worker in workers if pool in worker.pools and worker.accepts]
        failing = [worker.key for worker in accepting if (worker.key,) in blocked]
        if len(failing) < len(accepting):  # never a whole pool
            ejected += [key for key in failing if key not in ejected]
    keys = {worker.key for worker in workers}
    pairs = [key for key in blocked if len(key) == 2 and keys.issuperset(key)]
    for without_workers, without_pairs in ((ejected, pairs), (ejected, []), ([], pairs)):
        if _has_pair(workers, without_workers, without_pairs):
            return list(without_workers), list(without_pairs)
    return [], []


def _has_pair(
    workers: Sequence[Worker], without_workers: Sequence[WorkerKey], without_pairs: Sequence[BreakerKey]
) -> bool:
    remaining = [worker for worker in workers if worker.accepts and worker.key not in without_workers]
    excluded = set(without_pairs)
    return any(
        prefill.reaches(decode) and (prefill.key, decode.key) not in excluded
        for prefill in remaining
        if prefill.computes_prompts
        for decode in remaining
        if decode.decodes
    )
