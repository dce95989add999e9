"""The workers of one model as columns, so that a routing decision is a few vector operations per pool.

Columns cache a snapshot and the account of work. `refresh` reads only the workers that have changed since the previous
snapshot, or whose load has changed, and derives the columns anew.
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
from typing_extensions import override

from coordinator.workers.load import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    DEFAULT_STEP_S,
    DecodeLoad,
    PrefillLoad,
    WorkerLoads,
)
from coordinator.workers.snapshot import PoolSnapshot, Worker, WorkerKey
from splitserve.roles import PoolName

MOST_CROWDED = 12.0
"""Weight of a second of prefill for other requests when every prefill worker is busy. From 4 on, the mean TTFT of
traces is flat while cache hits still rise; see docs/guides/routing.md."""
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
        self.slots = np.full(count, -1, np.int64)
        self.width = 0
        """One more than the highest slot."""
        # Workers of one model have one layout: registration refuses another one.
        self.block_size = float(workers[0].block_size_tokens) if workers else 0.0
        self.block_bytes = float(workers[0].block_bytes) if workers else 0.0
        self.name_hashes = np.array(
            [xxhash.xxh3_64_intdigest(worker.worker_id.encode()) for worker in workers], np.uint64
        )

    def home(self, session_id: str) -> int:
        """Row of the session's home among the workers that accept requests.

        Highest random weight (Thaler and Ravishankar, 1998): when a worker joins or leaves, only sessions move whose
        home it becomes or was.
        """
        mixed = self.name_hashes ^ np.uint64(xxhash.xxh3_64_intdigest(session_id.encode()))
        # Both operands are hashes: one multiplication makes the order independent between sessions.
        mixed *= _MIX
        mixed *= self.ready
        return int(mixed.argmax())

    def read_row(self, row: int, worker: Worker) -> None:
        """Takes a worker's new state. Columns that are derived of several rows follow with `derive`."""
        self.workers[row] = worker
        self.slots[row] = worker.prefix_slot
        self.ready[row] = worker.accepts

    def derive(self) -> None:
        """Computes the derived columns."""
        self.width = int(self.slots.max(initial=-1)) + 1


def _with_mean(measured: Column, default: float) -> tuple[Column, float]:
    """The measured values, with their mean for those that are 0, and the mean."""
    known = np.count_nonzero(measured)
    mean = float(np.add.reduce(measured)) / known if known else default
    return measured if known == len(measured) else np.where(measured > 0, measured, mean), mean


def crowding(busy: int, ready: int) -> float:
    """Weight of a second of prefill for the requests behind it: 0 when all workers are idle.

    Work delays all requests that arrive until the worker is idle again, which takes longer the busier the worker is.
    The share of busy workers measures that.
    """
    return MOST_CROWDED * (busy / ready) ** 2 if ready else 0.0


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
        self.queue_s = self.token_s = np.zeros(shape[0])
        self.mean_token_s = 0.0
        self.crowded = 0.0
        """Weight of a second of prefill for the requests behind it."""
        self._agents = [worker.agent_id for worker in decodes]
        self._measured = np.zeros(shape)
        """[prefill, decode]: GB/s of the lane; 0: not measured; infinite between both ends of one worker."""
        self._lane_keys: list[tuple[frozenset[str], int] | None] = [None] * shape[0]
        self.unreached = np.full(shape, np.inf)
        """[prefill, decode]: 0 for connected pairs, else infinite."""
        self.byte_s = np.zeros(shape)
        """[prefill, decode]: seconds per byte of KV on the lane; the mean where nothing was measured."""
        self.least_byte_s = np.zeros(shape[1])
        self._lanes_stale = True
        for row, worker in enumerate(workers):
            self.read_row(row, worker)

    @override
    def read_row(self, row: int, worker: Worker) -> None:
        super().read_row(row, worker)
        load = self._loads[worker.key]
        self._queued[row], self._rate[row] = load.queued_tokens, load.measured_rate
        lane_key = worker.reached_agents, len(worker.lanes)
        if lane_key != self._lane_keys[row]:
            self._lane_keys[row] = lane_key
            self._read_lanes(row, worker)

    def _read_lanes(self, row: int, worker: Worker) -> None:
        reached = worker.reached_agents | ({worker.agent_id} if worker.role == "both" else frozenset())
        self.unreached[row] = [0.0 if agent in reached else np.inf for agent in self._agents]
        # A pair of one worker transfers nothing.
        speeds = {lane.agent_id: lane.gb_per_second for lane in worker.lanes} | {worker.agent_id: np.inf}
        self._measured[row] = [speeds.get(agent, 0.0) for agent in self._agents]
        self._lanes_stale = True

    @override
    def derive(self) -> None:
        super().derive()
        if self._lanes_stale:
            known = self._measured[(self._measured > 0) & (self._measured < np.inf)]
            # Without any measurement transfers cost 0: they cannot distinguish pairs.
            mean = float(known.mean()) if len(known) else np.inf
            self.byte_s = 1 / (np.where(self._measured > 0, self._measured, mean) * _GB)
            self.least_byte_s = self.byte_s.min(0) if len(self.byte_s) else self.least_byte_s
            self._lanes_stale = False
        rate, mean_rate = _with_mean(self._rate, DEFAULT_PREFILL_TOKENS_PER_S)
        self.token_s, self.mean_token_s = 1 / rate, 1 / mean_rate
        self.queue_s = np.where(self.ready, self._queued * self.token_s, np.inf)
        busy = np.count_nonzero(self.ready & (self._queued > 0))
        self.crowded = crowding(int(busy), int(np.count_nonzero(self.ready)))


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
        self.free, self.prompts_s = np.zeros(count), np.zeros(count)
        self.step_s = self.block_s = self.batch_s = np.zeros(count)
        self._own_step, self._held, self._fill = np.zeros(count), np.ones(count), np.zeros(count)
        for row, worker in enumerate(workers):
            self.read_row(row, worker)

    @override
    def read_row(self, row: int, worker: Worker) -> None:
        super().read_row(row, worker)
        load = self._loads[worker.key]
        self.free[row], self.prompts_s[row] = load.free_blocks, load.prompts_s
        self._fill[row] = 1 + load.batch_requests / load.slots
        self._held[row] = max(1, load.held_blocks)
        self._own_step[row] = load.measured_step_s

    @override
    def derive(self) -> None:
        super().derive()
        self.step_s, _ = _with_mean(self._own_step, DEFAULT_STEP_S)
        self.block_s = self.step_s / self._held
        self.batch_s = np.where(self.ready, self.step_s * self._fill, np.inf)

    def bytes_lacking(self, prompt_tokens: int, depths: Column | None) -> Column:
        """Bytes of a prompt's KV that each worker lacks, float64 [workers]. `depths`: cached leading blocks by slot,
        float64 [slots + 1]; None: no worker caches any."""
        blocks = -(-prompt_tokens // self.block_size)
        if depths is None:
            return np.full(len(self.workers), blocks * self.block_bytes)
        held = np.minimum(depths.take(self.slots, mode="wrap"), blocks)
        lacking: Column = (blocks - held) * self.block_bytes
        return lacking


class ModelColumns:
    """Both pools of one model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._seen: tuple[Worker, ...] = ()
        self._loads: WorkerLoads | None = None
        self._load_changes: list[WorkerKey] = []
        self._load_changes_seen = 0
        self._position: dict[str, int] = {}
        self.prefill, self.decode = PrefillColumns(), DecodeColumns()

    def refresh(self, snapshot: PoolSnapshot, loads: WorkerLoads) -> None:
        """Brings the columns up to date with the snapshot's workers, in their order, and their loads."""
        if loads is not self._loads or not self._update(snapshot.workers, loads):
            self._build(snapshot.workers, loads)
        self._seen, self._loads = snapshot.workers, loads
        self._load_changes, self._load_changes_seen = loads.changes, len(loads.changes)
        self.prefill.derive()
        self.decode.derive()

    def _update(self, workers: tuple[Worker, ...], loads: WorkerLoads) -> bool:
        """Reads the changed rows. False if the set of workers changed, so that the columns must be rebuilt."""
        seen = self._seen
        if len(workers) != len(seen) or loads.changes is not self._load_changes:
            return False
        changed = set[int]()
        if workers is not seen:
            changed.update(compress(range(len(workers)), map(is_not, workers, seen)))
        for worker_id, _ in loads.changes[self._load_changes_seen :]:
            if (index := self._position.get(worker_id)) is not None:
                changed.add(index)
        for index in changed:
            worker, before = workers[index], seen[index]
            if worker.key != before.key or worker.role != before.role:
                return False
            for columns in (self.prefill, self.decode):  # a worker of role `both` has a row in each
                if (row := columns.row_of.get(worker.key)) is not None:
                    columns.read_row(row, worker)
        return True

    def _build(self, workers: tuple[Worker, ...], loads: WorkerLoads) -> None:
        ours = [worker for worker in workers if worker.serves(self._model)]
        decodes = [worker for worker in ours if worker.decodes]
        prefills = [worker for worker in ours if worker.computes_prompts]
        self.prefill = PrefillColumns(prefills, decodes, loads.prefill)
        self.decode = DecodeColumns(decodes, loads.decode)
        self._position = {worker.worker_id: index for index, worker in enumerate(workers)}
