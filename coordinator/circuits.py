"""The circuit breakers of all workers and pairs: fed by attempts, told to the registry.

An open breaker takes its worker, or its pair of workers, out of routing. It never takes out the last: a pool of which
every worker is open goes on with all of them, and where what is left would have no complete pair, pairs come back
first and then workers. A request that may fail is better than none served: it is tried again elsewhere anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from coordinator.attempt import Attempt
from coordinator.circuit_breaker import CircuitBreaker, blamed
from coordinator.pools import CLOSED_CIRCUIT, Circuit, PoolSnapshot, Worker, WorkerKey
from coordinator.registry import Registry
from splitserve.errors import SplitserveError
from splitserve.logs import log_event
from splitserve.traffic_settings import CircuitBreakerConfig

Place = tuple[WorkerKey, ...]
"""A worker, or a prefill worker and a decode worker."""


class Circuits:
    """Breakers exist from a place's first failure on, until one of its boots is gone."""

    def __init__(self, registry: Registry, policy: CircuitBreakerConfig) -> None:
        self._registry = registry
        self._policy = policy
        self._breakers: dict[Place, CircuitBreaker] = {}

    @contextmanager
    def judging(self, attempt: Attempt) -> Iterator[Judgement]:
        """Around an attempt: what it raises is counted where the blame is."""
        judgement = Judgement(self, attempt)
        self._apply_if(self._begin(attempt))
        try:
            yield judgement
        except SplitserveError as error:
            self._failed(judgement, error)
            raise
        else:
            self._ended(judgement, ended=True)
        finally:
            self._let_go(attempt)

    async def run(self) -> None:
        """Lets open breakers become half-open in time and forgets workers that are gone, until cancelled."""
        while True:
            self._tick(time.monotonic())
            version = self._registry.version
            waits = [b.half_open_s for b in self._breakers.values() if b.state == "open"]
            left_s = max(0.0, min(waits) - time.monotonic()) if waits else None
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._registry.wait_change(version)

    def _tick(self, now: float) -> None:
        here = {worker.key for worker in self._registry.snapshot().workers}
        for place in [place for place in self._breakers if not here.issuperset(place)]:
            del self._breakers[place]
        for breaker in self._breakers.values():
            breaker.tick(now)
        self._apply()

    def _begin(self, attempt: Attempt) -> bool:
        known = [b for b in map(self._breakers.get, _places(attempt)) if b is not None]
        for breaker in known:
            breaker.began(attempt.attempt_id)
        return any(breaker.state == "half-open" for breaker in known)

    def _failed(self, judgement: Judgement, error: SplitserveError) -> None:
        attempt, who = judgement.attempt, blamed(error)
        pair = attempt.pair
        place: Place | None = pair if who == "pair" else (attempt.culprit,) if who == "worker" else None
        if not self._policy.enabled or place is None:
            return
        breaker = self._breakers.setdefault(place, CircuitBreaker(self._policy))
        before = breaker.state
        breaker.failed(judgement.began_s, time.monotonic())
        if breaker.state == "open" and before != "open":
            names = [worker_id for worker_id, _ in place]
            rest_s = round(breaker.half_open_s - time.monotonic(), 3)
            log_event("circuit.opened", workers=names, reason=error.reason, half_open_in_s=rest_s)
        self._apply_if(breaker.state != before)

    def _ended(self, judgement: Judgement, *, ended: bool) -> None:
        """Output came, or all of it did: counts for everyone who took part."""
        now, changed = time.monotonic(), False
        for place in judgement.attempt.took_part:
            breaker = self._breakers.get(place)
            if breaker is None:
                continue
            before = breaker.state
            if ended:
                breaker.succeeded(judgement.began_s, now)
            else:
                breaker.answered(judgement.began_s, now)
            if breaker.state != before:
                changed = True
                log_event("circuit.closed", workers=[worker_id for worker_id, _ in place])
        self._apply_if(changed)

    def _let_go(self, attempt: Attempt) -> None:
        admitting = False
        for place in _places(attempt):
            breaker = self._breakers.get(place)
            if breaker is not None:
                breaker.let_go(attempt.attempt_id)
                admitting |= breaker.state == "half-open"
        self._apply_if(admitting)

    def _apply_if(self, changed: bool) -> None:
        if changed:
            self._apply()

    def _apply(self) -> None:
        snapshot = self._registry.snapshot()
        if self._breakers or any(worker.circuit is not CLOSED_CIRCUIT for worker in snapshot.workers):
            self._registry.set_circuits(circuits_of(snapshot, self._breakers))


@dataclass(slots=True)
class Judgement:
    """One attempt under observation."""

    circuits: Circuits
    attempt: Attempt
    began_s: float = 0.0
    _decode_seen: bool = False

    def __post_init__(self) -> None:
        self.began_s = time.monotonic()

    def delta_came(self) -> None:
        """A piece of output came. The first that shows all workers at work ends their probation."""
        if not self._decode_seen and self.attempt.all_at_work:
            self._decode_seen = True
            self.circuits._ended(self, ended=False)


def circuits_of(snapshot: PoolSnapshot, breakers: Mapping[Place, CircuitBreaker]) -> dict[WorkerKey, Circuit]:
    """What the breakers mean for each worker of the snapshot that is not closed all round. Pure."""
    shut = {place for place, breaker in breakers.items() if not breaker.admits}
    out: list[WorkerKey] = []
    lanes: list[Place] = []
    for model in snapshot.models():
        kept = _exclusions(snapshot, model, shut)
        out += kept[0]
        lanes += kept[1]
    by_agent = {worker.key: worker.agent_id for worker in snapshot.workers}
    found: dict[WorkerKey, Circuit] = {}
    for worker in snapshot.workers:
        own = breakers.get((worker.key,))
        pairs = tuple(
            (by_agent[place[1]], breaker.state)
            for place, breaker in breakers.items()
            if len(place) == 2
            and place[0] == worker.key
            and breaker.state != "closed"
            and place[1] in by_agent
        )
        circuit = Circuit(
            state=own.state if own else "closed",
            tripped=worker.key in out,
            pairs=pairs,
            cut_agents=frozenset(by_agent[decode] for prefill, decode in lanes if prefill == worker.key),
        )
        if circuit != CLOSED_CIRCUIT:
            found[worker.key] = circuit
    return found


def _exclusions(snapshot: PoolSnapshot, model: str, shut: set[Place]) -> tuple[list[WorkerKey], list[Place]]:
    """Which workers and pairs of a model go out: as many as leave a complete pair, if there is one at all."""
    workers = [replace(w, circuit=CLOSED_CIRCUIT) for w in snapshot.workers if w.model.name == model]
    out: list[WorkerKey] = []
    for pool in ("prefill", "decode"):
        accepting = [worker for worker in workers if worker.pool == pool and worker.accepts]
        bad = [worker.key for worker in accepting if (worker.key,) in shut]
        out += bad if len(bad) < len(accepting) else []
    keys = {worker.key for worker in workers}
    lanes = [place for place in shut if len(place) == 2 and keys.issuperset(place)]
    for workers_out, lanes_out in ((out, lanes), (out, []), ([], lanes)):
        if _has_pair(workers, workers_out, lanes_out):
            return list(workers_out), list(lanes_out)
    return [], []


def _has_pair(workers: Sequence[Worker], out: Sequence[WorkerKey], lanes: Sequence[Place]) -> bool:
    left = [worker for worker in workers if worker.accepts and worker.key not in out]
    cut = set(lanes)
    return any(
        prefill.reaches(decode) and (prefill.key, decode.key) not in cut
        for prefill in left
        if prefill.pool == "prefill"
        for decode in left
        if decode.pool == "decode"
    )


def _places(attempt: Attempt) -> list[Place]:
    pair = attempt.pair
    return [*((key,) for key in pair), *([pair] if len(pair) == 2 else [])]
