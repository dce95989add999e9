"""Moves requests away from workers whose machines are taken away, by the deadlines of their spot notices."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from prometheus_client.core import Metric

from coordinator.attempt_state import MOVED
from coordinator.request.observer import RunningAttempts
from coordinator.request.state import RequestState
from coordinator.spot.move_plan import MoveLimits, moves_now
from coordinator.spot.remaining_work import works_on
from coordinator.workers.clients import WorkerClients
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.config.coordinator import SpotMovesConfig
from splitserve.errors import UnavailableError
from splitserve.logs import log_event
from splitserve.metrics import counter, gauge

LOOK_EVERY_S = 0.1
FIRST_MOVE_S = 1.0
"""What a move is expected to take before one has been seen."""
SMOOTHING = 0.3


@dataclass(frozen=True, slots=True)
class _Move:
    """A request that has left a worker and has not gone on elsewhere yet."""

    worker: WorkerKey
    state: RequestState
    attempts: int
    tokens: int
    began_s: float

    @property
    def is_over(self) -> bool:
        """Whether the request has got a token elsewhere."""
        return self.state.attempts > self.attempts and len(self.state.token_ids) > self.tokens


class SpotMover:
    """Fails the running attempts that have to leave a worker: they resume elsewhere.

    Nothing moves while no other workers could take it: the worker may live a little longer.
    """

    def __init__(self, config: SpotMovesConfig, registry: Registry, clients: WorkerClients) -> None:
        self._config, self._registry, self._clients = config, registry, clients
        self.running = RunningAttempts()
        """To be told of every request."""
        self._moving: dict[str, _Move] = {}
        """By attempt id."""
        self._moves = 0
        self._move_s = FIRST_MOVE_S
        self._stuck: set[WorkerKey] = set()
        """Workers with requests that no others can take."""

    async def run(self) -> None:
        """Looks while any worker has a notice, until cancelled."""
        while True:
            version = self._registry.version
            if self.look(time.monotonic()) or self._moving:
                await asyncio.sleep(LOOK_EVERY_S)
            else:
                await self._registry.wait_change(version)

    def look(self, now: float) -> bool:
        """Moves what has to move now. Whether any worker has a notice."""
        workers = self._registry.snapshot().preempted
        self._stuck &= {worker.key for worker in workers}
        self._end_moves(now)
        for worker in workers:
            self._look_at(worker, now)
        return bool(workers)

    def metrics(self) -> list[Metric]:
        """How many workers have a notice, and how many attempts were moved."""
        there = len(self._registry.snapshot().preempted)
        moves = "Attempts moved away from workers with a spot notice"
        return [
            gauge("splitserve_preempted_workers", "Registered workers with a spot notice", there),
            counter("splitserve_spot_moves", moves, self._moves),
        ]

    def _look_at(self, worker: Worker, now: float) -> None:
        staying = [state for name, state in self.running.attempts.items() if name not in self._moving]
        left_s = (worker.preempted_in_s(now) or 0.0) - self._config.margin_s
        # An attempt that does not end soon waits for its reservation or for its client: no other worker has it.
        under_way = sum(
            move.worker == worker.key
            and (name not in self.running.attempts or now - move.began_s < FIRST_MOVE_S)
            for name, move in self._moving.items()
        )
        limits = MoveLimits(self._config.moves_at_once, self._move_s)
        leaving = moves_now(works_on(worker, staying), left_s, under_way, limits)
        ready = self._registry.snapshot().ready_models() if leaving else frozenset()
        for attempt_id in leaving:
            state = self.running.attempts[attempt_id]
            if state.request.model.name in ready:
                self._move(worker, attempt_id, state, now)
            elif worker.key not in self._stuck:
                self._stuck.add(worker.key)
                log_event("spot.stuck", level=logging.WARNING, worker_id=worker.worker_id)

    def _move(self, worker: Worker, attempt_id: str, state: RequestState, now: float) -> None:
        error = UnavailableError(f"the machine of {worker.name} is taken away", reason=MOVED)
        try:
            moved = self._clients.client_for(worker).fail(attempt_id, error)
        except UnavailableError:
            return  # it has just gone, and its requests resume for that
        if moved:
            self._moves += 1
            self._moving[attempt_id] = _Move(worker.key, state, state.attempts, len(state.token_ids), now)

    def _end_moves(self, now: float) -> None:
        for attempt_id, move in list(self._moving.items()):
            if not self.running.has(move.state):
                del self._moving[attempt_id]
            elif move.is_over:
                del self._moving[attempt_id]
                self._move_s += SMOOTHING * (now - move.began_s - self._move_s)
