"""The workers of one model as columns of numbers, so that a decision costs a few operations on whole pools.

A memo of a snapshot and nothing else: `refresh` writes only the rows of workers that are other objects than in the
snapshot before, which costs little, since a snapshot's workers never change. A snapshot's change log tells which ones
to look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import is_not
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from coordinator.pools import ChangeLog, PoolSnapshot, Worker, WorkerKey
from coordinator.route_scores import DEFAULT_PREFILL_TOKENS_PER_S, DEFAULT_STEP_S, crowding

Column = npt.NDArray[np.float64]
_GB = 1e9
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Pool:
    """What both pools have in common. `place` finds a boot's row."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        count = len(workers)
        self.workers = list(workers)
        self.place: dict[WorkerKey, int] = {worker.key: row for row, worker in enumerate(workers)}
        self.ready = np.zeros(count, np.bool_)
        self.ready_count = 0
        self.unmeasured = count
        """Workers without a measured speed; they count as the mean of the others."""
        self.mean_stale = True
        self.slots = np.full(count, -1, np.int64)
        # Reading one element of an array takes longer than one of a list.
        self._slots, self._accepts = [-1] * count, [False] * count
        self.width = 0
        """One more than the highest slot."""
        self.names = np.array(
            [xxhash.xxh3_64_intdigest(worker.worker_id.encode()) for worker in workers], np.uint64
        )
        self._speeds = [0.0] * count
        self._mixed = np.empty_like(self.names)

    def home(self, session_id: str) -> int:
        """The session's home among those that take requests, by highest random weight (Thaler and Ravishankar, 1998):

        of the other sessions' homes none moves when a worker comes or goes.
        """
        session, mixed = np.uint64(xxhash.xxh3_64_intdigest(session_id.encode())), self._mixed
        np.bitwise_xor(self.names, session, out=mixed)
        # Both are hashes already: one multiplication is enough to make their order independent of other sessions'.
        np.multiply(mixed, _MIX, out=mixed)
        if self.ready_count < len(mixed):
            np.multiply(mixed, self.ready, out=mixed)
        return int(mixed.argmax())

    def _write(self, row: int, worker: Worker) -> bool:
        """Writes what any worker has; whether it takes new requests."""
        self.workers[row] = worker
        if worker.prefix_slot != self._slots[row]:
            self.slots[row] = self._slots[row] = worker.prefix_slot
            self.width = int(self.slots.max()) + 1
        accepts = worker.accepts
        if accepts != self._accepts[row]:
            self.ready[row] = self._accepts[row] = accepts
            self.ready_count += 1 if accepts else -1
            self.mean_stale = True
        return accepts

    def _write_speed(self, row: int, speed: float, column: Column) -> None:
        if speed != (before := self._speeds[row]):
            column[row] = self._speeds[row] = speed
            self.unmeasured += (not speed) - (not before)
            self.mean_stale = True

    def _mean(self, speeds: Column, default: float) -> float:
        """The mean of what was measured."""
        known = len(speeds) - self.unmeasured
        return float(np.add.reduce(speeds)) / known if known else default


class PrefillRows(Pool):
    """Prefill workers: `queue_s` (infinite for who takes no requests) and `token_s`, seconds a prompt token."""

    def __init__(self, workers: Sequence[Worker], decodes: Sequence[Worker]) -> None:
        super().__init__(workers)
        shape = len(workers), len(decodes)
        self._queued, self._rate = np.zeros(shape[0]), np.zeros(shape[0])
        self.queue_s, self.token_s = np.zeros(shape[0]), np.zeros(shape[0])
        self._agents = [worker.agent_id for worker in decodes]
        self._measured = np.zeros(shape)
        self._lane_keys: list[tuple[frozenset[str], int] | None] = [None] * shape[0]
        self.unreached = np.full(shape, np.inf)
        """0 for the pairs that are connected, else infinite."""
        self.reaches_all = [False] * shape[0]
        self.byte_s = np.zeros(shape)
        """Seconds a byte of KV from a row's worker to a column's; the mean where nothing was measured."""
        self.least_byte_s = np.zeros(shape[1])
        self._lanes_stale = True
        self.mean_token_s = 0.0
        self._is_busy, self._busy = [False] * shape[0], 0
        for row, worker in enumerate(workers):
            self.write(row, worker)

    def write(self, row: int, worker: Worker) -> None:
        """Takes a worker's new state."""
        accepts, load = self._write(row, worker), worker.load
        lane_key = worker.connected_agents, len(worker.lanes)
        if lane_key != self._lane_keys[row]:
            self._lane_keys[row] = lane_key
            self._write_lanes(row, worker)
        rate, queued = load.prefill_tokens_per_second, load.waiting_tokens + worker.sent_tokens
        self._write_speed(row, rate, self._rate)
        self._queued[row] = queued
        is_busy = accepts and queued > 0
        self._busy += is_busy - self._is_busy[row]
        self._is_busy[row] = is_busy
        if rate:
            # A product as in `settle`, so that what a row says does not depend on how it came about.
            self.token_s[row] = token_s = 1 / rate
            self.queue_s[row] = queued * token_s if accepts else np.inf

    def _write_lanes(self, row: int, worker: Worker) -> None:
        reached = worker.reached_agents
        self.unreached[row] = [0.0 if agent in reached else np.inf for agent in self._agents]
        self.reaches_all[row] = reached.issuperset(self._agents)
        speeds = {lane.agent_id: lane.gb_per_second for lane in worker.lanes}
        self._measured[row] = [speeds.get(agent, 0.0) for agent in self._agents]
        self._lanes_stale = True

    def settle(self) -> None:
        """Works out anew what depends on all rows, if it has to be."""
        if self._lanes_stale:
            known = self._measured[self._measured > 0]
            # Without any measurement transfers cost nothing: they cannot tell pairs apart.
            default = 1 / float(known.mean()) if len(known) else 0.0
            self.byte_s = np.full(self._measured.shape, default)
            np.divide(1, self._measured, out=self.byte_s, where=self._measured > 0)
            self.byte_s /= _GB
            self.least_byte_s = self.byte_s.min(0) if len(self.byte_s) else self.least_byte_s
            self._lanes_stale = False
        if self.mean_stale:
            self.mean_token_s = 1 / self._mean(self._rate, DEFAULT_PREFILL_TOKENS_PER_S)
            self.mean_stale = False
        if self.unmeasured:
            self.token_s[self._rate == 0] = self.mean_token_s
            self.queue_s = np.where(self.ready, self._queued * self.token_s, np.inf)

    @property
    def crowded(self) -> float:
        """See `route_scores.crowding`."""
        return crowding(self._busy, self.ready_count)


class DecodeRows(Pool):
    """Decode workers: blocks free, `block_s` (seconds a step waits for one missing block) and `batch_s`."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(workers)
        count = len(workers)
        self.free, self.block_s, self.batch_s = np.zeros(count), np.zeros(count), np.zeros(count)
        self.step_s = np.zeros(count)
        self._own_step, self._held, self._fill = np.zeros(count), np.ones(count), np.zeros(count)
        for row, worker in enumerate(workers):
            self.write(row, worker)

    def write(self, row: int, worker: Worker) -> None:
        """Takes a worker's new state."""
        accepts, load = self._write(row, worker), worker.load
        self.free[row] = load.free_blocks + (-worker.sent_tokens // worker.block_size_tokens)
        requests = load.running_requests + load.waiting_requests + load.waiting_reservations
        self._fill[row] = fill = 1 + (requests + worker.sent_requests) / worker.max_running_requests
        self._held[row] = held = max(1, load.referenced_blocks + load.reserved_blocks)
        step_s = load.decode_step_ms / 1e3
        self._write_speed(row, step_s, self._own_step)
        if step_s:
            self.step_s[row], self.block_s[row] = step_s, step_s / held
            self.batch_s[row] = step_s * fill if accepts else np.inf

    def settle(self) -> None:
        """Gives those without a measurement the mean."""
        if self.unmeasured:
            self.step_s[self._own_step == 0] = self._mean(self._own_step, DEFAULT_STEP_S)
            self.block_s = self.step_s / self._held
            self.batch_s = np.where(self.ready, self.step_s * self._fill, np.inf)


class ModelRows:
    """Both pools of one model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._seen: tuple[Worker, ...] = ()
        self._log: ChangeLog | None = None
        self._index: dict[str, int] = {}
        self._rows: list[tuple[PrefillRows | DecodeRows, int] | None] = []
        self.prefill = PrefillRows((), ())
        self.decode = DecodeRows(())

    def refresh(self, snapshot: PoolSnapshot) -> None:
        """Makes the columns those of the snapshot's workers, in their order."""
        workers = snapshot.workers
        if workers is not self._seen and not self._update(workers, self._changed(snapshot)):
            self._build(workers)
        self._seen, self._log = workers, snapshot.changes
        self.prefill.settle()
        self.decode.settle()

    def _changed(self, snapshot: PoolSnapshot) -> Iterable[int]:
        """Indices of the workers that are others than before; all that differ are among them."""
        log, before, workers = snapshot.changes, self._log, snapshot.workers
        if log is None or before is None or log.worker_ids is not before.worker_ids:
            return compress(range(len(workers)), map(is_not, workers, self._seen))
        changed = log.worker_ids[min(log.length, before.length) : max(log.length, before.length)]
        return {self._index[worker_id] for worker_id in changed}

    def _update(self, workers: tuple[Worker, ...], changed: Iterable[int]) -> bool:
        if len(workers) != len(self._seen):
            return False
        seen, rows = self._seen, self._rows
        for index in changed:
            worker, place = workers[index], rows[index]
            if worker.epoch != seen[index].epoch or worker.worker_id != seen[index].worker_id:
                return False
            if place is not None:
                place[0].write(place[1], worker)
        return True

    def _build(self, workers: tuple[Worker, ...]) -> None:
        ours = [worker for worker in workers if worker.model.name == self._model]
        prefills = [worker for worker in ours if worker.pool == "prefill"]
        decodes = [worker for worker in ours if worker.pool == "decode"]
        self.prefill, self.decode = PrefillRows(prefills, decodes), DecodeRows(decodes)
        places: dict[WorkerKey, Any] = {key: (self.prefill, row) for key, row in self.prefill.place.items()}
        places |= {key: (self.decode, row) for key, row in self.decode.place.items()}
        self._rows = [places.get(worker.key) for worker in workers]
        self._index = {worker.worker_id: index for index, worker in enumerate(workers)}
