"""The workers of one model as columns, so that a routing decision is a few vector operations per pool.

Columns cache a snapshot and the account of work. `refresh` updates only the rows of workers that have changed since the
previous snapshot, or whose load has changed, according to the change logs of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from operator import is_not
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from coordinator.routing.router import crowding
from coordinator.workers.load import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    DEFAULT_STEP_S,
    DecodeLoad,
    PrefillLoad,
    WorkerLoads,
)
from coordinator.workers.snapshot import ChangeLog, PoolSnapshot, Worker, WorkerKey
from splitserve.roles import PoolName

Column = npt.NDArray[np.float64]
_GB = 1e9
_MIX = np.uint64(0x9E3779B97F4A7C15)
"""Fibonacci hashing multiplier, 2**64 / golden ratio."""
NO_LOADS: Mapping[WorkerKey, Any] = MappingProxyType({})


class WorkerColumns:
    """The columns of both pools, each [workers]; `row_of` maps a boot to its row."""

    name: PoolName

    def __init__(self, workers: Sequence[Worker]) -> None:
        count = len(workers)
        self.workers = list(workers)
        self.row_of: dict[WorkerKey, int] = {worker.key: row for row, worker in enumerate(workers)}
        self.ready = np.zeros(count, np.bool_)
        self.ready_count = 0
        self.unmeasured = count
        """Number of workers without a measured speed, which get the mean of the others."""
        self.mean_stale = True
        self.slots = np.full(count, -1, np.int64)
        # Lists mirror the arrays: reading one element of an array is slower.
        self._slots, self._accepts = [-1] * count, [False] * count
        self.width = 0
        """One more than the highest slot."""
        # Workers of one model have one layout: registration refuses another one.
        self.block_size = float(workers[0].block_size_tokens) if workers else 0.0
        self.block_bytes = float(workers[0].block_bytes) if workers else 0.0
        self.name_hashes = np.array(
            [xxhash.xxh3_64_intdigest(worker.worker_id.encode()) for worker in workers], np.uint64
        )
        self._speeds = [0.0] * count
        self._mixed = np.empty_like(self.name_hashes)

    def home(self, session_id: str) -> int:
        """Row of the session's home among the workers that accept requests.

        Highest random weight (Thaler and Ravishankar, 1998): when a worker joins or leaves, only sessions move whose
        home it becomes or was.
        """
        session, mixed = np.uint64(xxhash.xxh3_64_intdigest(session_id.encode())), self._mixed
        np.bitwise_xor(self.name_hashes, session, out=mixed)
        # Both operands are hashes: one multiplication makes the order independent between sessions.
        np.multiply(mixed, _MIX, out=mixed)
        if self.ready_count < len(mixed):
            np.multiply(mixed, self.ready, out=mixed)
        return int(mixed.argmax())

    def _write(self, row: int, worker: Worker) -> bool:
        """Updates the common columns. Returns whether the worker takes new requests."""
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
        """The mean of the measured speeds."""
        known = len(speeds) - self.unmeasured
        return float(np.add.reduce(speeds)) / known if known else default


class PrefillColumns(WorkerColumns):
    """Prefill workers: `queue_s` [workers], infinite if not accepting, and `token_s` [workers], seconds per token."""

    name = "prefill"

    def __init__(
        self,
        workers: Sequence[Worker] = (),
        decodes: Sequence[Worker] = (),
        loads: Mapping[WorkerKey, PrefillLoad] = NO_LOADS,
    ) -> None:
        super().__init__(workers)
        self._loads = loads
        shape = len(workers), len(decodes)
        self._queued, self._rate = np.zeros(shape[0]), np.zeros(shape[0])
        self.queue_s, self.token_s = np.zeros(shape[0]), np.zeros(shape[0])
        self._agents = [worker.agent_id for worker in decodes]
        self._own = [(row, self._agents.index(w.agent_id)) for row, w in enumerate(workers) if w.decodes]
        """(row, column) of each worker of role `both`, whose pair with itself has no handoff."""
        self._measured = np.zeros(shape)
        self._lane_keys: list[tuple[frozenset[str], int] | None] = [None] * shape[0]
        self.unreached = np.full(shape, np.inf)
        """[prefill, decode]: 0 for connected pairs, else infinite."""
        self.reaches_all = [False] * shape[0]
        self.byte_s = np.zeros(shape)
        """[prefill, decode]: seconds per byte of KV on the lane; the mean where nothing was measured."""
        self.least_byte_s = np.zeros(shape[1])
        self._lanes_stale = True
        self.mean_token_s = 0.0
        self._is_busy, self._busy = [False] * shape[0], 0
        for row, worker in enumerate(workers):
            self.update_row(row, worker)

    def update_row(self, row: int, worker: Worker) -> None:
        """Takes a worker's new state."""
        accepts, load = self._write(row, worker), self._loads[worker.key]
        lane_key = worker.reached_agents, len(worker.lanes)
        if lane_key != self._lane_keys[row]:
            self._lane_keys[row] = lane_key
            self._write_lanes(row, worker)
        rate, queued = load.measured_rate, load.queued_tokens
        self._write_speed(row, rate, self._rate)
        self._queued[row] = queued
        is_busy = accepts and queued > 0
        self._busy += is_busy - self._is_busy[row]
        self._is_busy[row] = is_busy
        if rate:
            # The same expression as in `finish_update`, so that both paths give bit-identical rows.
            self.token_s[row] = token_s = 1 / rate
            self.queue_s[row] = queued * token_s if accepts else np.inf

    def _write_lanes(self, row: int, worker: Worker) -> None:
        reached = worker.reached_agents | ({worker.agent_id} if worker.role == "both" else frozenset())
        self.unreached[row] = [0.0 if agent in reached else np.inf for agent in self._agents]
        self.reaches_all[row] = reached.issuperset(self._agents)
        speeds = {lane.agent_id: lane.gb_per_second for lane in worker.lanes}
        # A pair of one worker transfers nothing.
        speeds[worker.agent_id] = np.inf
        self._measured[row] = [speeds.get(agent, 0.0) for agent in self._agents]
        self._lanes_stale = True

    def finish_update(self) -> None:
        """Recomputes the values that depend on all rows, if stale."""
        if self._lanes_stale:
            known = self._measured[(self._measured > 0) & (self._measured < np.inf)]
            # Without any measurement transfers cost 0: they cannot distinguish pairs.
            default = 1 / float(known.mean()) if len(known) else 0.0
            self.byte_s = np.full(self._measured.shape, default)
            np.divide(1, self._measured, out=self.byte_s, where=self._measured > 0)
            self.byte_s /= _GB
            for row, column in self._own:
                self.byte_s[row, column] = 0.0
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
        """Weight of a second of prefill for the requests behind it."""
        return crowding(self._busy, self.ready_count)


class DecodeColumns(WorkerColumns):
    """Decode workers, each column [workers]: `free` blocks; `block_s`, seconds of wait per missing block and output
    token; `prompts_s`, seconds for the prompts that wait there; `batch_s`, the cost of a step in the batch, infinite if
    not accepting."""

    name = "decode"

    def __init__(
        self, workers: Sequence[Worker] = (), loads: Mapping[WorkerKey, DecodeLoad] = NO_LOADS
    ) -> None:
        super().__init__(workers)
        self._loads = loads
        count = len(workers)
        self.free, self.block_s, self.batch_s = np.zeros(count), np.zeros(count), np.zeros(count)
        self.step_s, self.prompts_s = np.zeros(count), np.zeros(count)
        self._own_step, self._held, self._fill = np.zeros(count), np.ones(count), np.zeros(count)
        for row, worker in enumerate(workers):
            self.update_row(row, worker)

    def update_row(self, row: int, worker: Worker) -> None:
        """Takes a worker's new state."""
        accepts, load = self._write(row, worker), self._loads[worker.key]
        self.free[row] = load.free_blocks
        self.prompts_s[row] = load.prompts_s
        self._fill[row] = fill = 1 + load.batch_requests / load.slots
        self._held[row] = held = max(1, load.held_blocks)
        step_s = load.measured_step_s
        self._write_speed(row, step_s, self._own_step)
        if step_s:
            self.step_s[row], self.block_s[row] = step_s, step_s / held
            self.batch_s[row] = step_s * fill if accepts else np.inf

    def finish_update(self) -> None:
        """Fills in the mean for workers without a measurement."""
        if self.unmeasured:
            self.step_s[self._own_step == 0] = self._mean(self._own_step, DEFAULT_STEP_S)
            self.block_s = self.step_s / self._held
            self.batch_s = np.where(self.ready, self.step_s * self._fill, np.inf)


class Transfers:
    """The KV of a prompt that each decode worker lacks."""

    def __init__(self, pool: DecodeColumns, prompt_tokens: int, depths: Column | None) -> None:
        """`depths`: cached leading blocks by slot, float64 [slots + 1]; None: no worker caches any."""
        blocks = -(-prompt_tokens // pool.block_size)
        self._bytes_lacking: Column | float = blocks * pool.block_bytes
        """A scalar if no worker caches any."""
        if depths is not None:
            held = np.minimum(depths.take(pool.slots, mode="wrap"), blocks)
            self._bytes_lacking = (blocks - held) * pool.block_bytes

    def seconds(self, byte_s: Column) -> Column:
        """Seconds until each worker has the KV, float64 [workers]. `byte_s`: seconds per byte of each lane."""
        transfer_s: Column = byte_s * self._bytes_lacking
        return transfer_s

    def seconds_to(self, row: int, byte_s: Column) -> Column:
        """Seconds to one of the workers over several lanes, float64 [lanes]."""
        lacking = self._bytes_lacking
        return byte_s * (lacking if isinstance(lacking, float) else lacking[row])


class ModelColumns:
    """Both pools of one model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._seen: tuple[Worker, ...] = ()
        self._log: ChangeLog | None = None
        self._loads: WorkerLoads | None = None
        self._load_changes: list[WorkerKey] = []
        self._load_changes_seen = 0
        self._position: dict[str, int] = {}
        self._locations: list[list[tuple[PrefillColumns | DecodeColumns, int]]] = []
        """The rows of each worker of the snapshot; a worker of role `both` has two."""
        self.prefill, self.decode = PrefillColumns(), DecodeColumns()

    def refresh(self, snapshot: PoolSnapshot, loads: WorkerLoads) -> None:
        """Brings the columns up to date with the snapshot's workers, in their order, and their loads."""
        if loads is not self._loads or not self._update(snapshot, loads):
            self._build(snapshot.workers, loads)
        self._seen, self._log = snapshot.workers, snapshot.changes
        self._loads, self._load_changes = loads, loads.changes
        self._load_changes_seen = len(loads.changes)
        self.prefill.finish_update()
        self.decode.finish_update()

    def _update(self, snapshot: PoolSnapshot, loads: WorkerLoads) -> bool:
        """Updates the changed rows. False if the set of workers changed, so that the columns must be rebuilt."""
        seen, rows, workers = self._seen, self._locations, snapshot.workers
        if len(workers) != len(seen):
            return False
        if loads.changes is self._load_changes:
            changed = self._changed(snapshot)
        else:
            changed, self._load_changes_seen = set(range(len(workers))), 0
        for worker_id, _ in loads.changes[self._load_changes_seen :]:
            if (index := self._position.get(worker_id)) is not None:
                changed.add(index)
        for index in changed:
            worker, before = workers[index], seen[index]
            if worker.key != before.key or worker.role != before.role:
                return False
            for columns, row in rows[index]:
                columns.update_row(row, worker)
        return True

    def _changed(self, snapshot: PoolSnapshot) -> set[int]:
        """Positions in the snapshot of workers that may have changed."""
        log, before, workers = snapshot.changes, self._log, snapshot.workers
        if workers is self._seen:
            return set()
        if log is None or before is None or log.worker_ids is not before.worker_ids:
            return set(compress(range(len(workers)), map(is_not, workers, self._seen)))
        changed = log.worker_ids[min(log.length, before.length) : max(log.length, before.length)]
        return {self._position[worker_id] for worker_id in changed}

    def _build(self, workers: tuple[Worker, ...], loads: WorkerLoads) -> None:
        ours = [worker for worker in workers if worker.serves(self._model)]
        prefills = [worker for worker in ours if worker.computes_prompts]
        decodes = [worker for worker in ours if worker.decodes]
        self.prefill = PrefillColumns(prefills, decodes, loads.prefill)
        self.decode = DecodeColumns(decodes, loads.decode)
        both = (self.prefill, self.decode)
        self._locations = [
            [(columns, columns.row_of[worker.key]) for columns in both if worker.key in columns.row_of]
            for worker in workers
        ]
        self._position = {worker.worker_id: index for index, worker in enumerate(workers)}
