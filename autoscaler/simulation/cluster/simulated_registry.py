"""The registry of the simulated coordinator: replicas as workers, which report as real workers do.

Reports are due every half second, and 100 ms after a cache has changed. They are processed lazily, when the next
request is routed, so a report that nobody would read costs nothing.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from autoscaler.simulation.cluster.neutral_replica import NeutralReplica
from autoscaler.simulation.cluster.replica import DecodeReplica, PrefillReplica, SimulatedReplica
from autoscaler.simulation.cluster.stepped.virtual_engine import KV_BLOCK_TOKENS
from autoscaler.simulation.traces.trace import BLOCK_TOKENS
from autoscaler.sizing.engine_model import EngineModel
from coordinator.workers.catalog import Model
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.prefix_index.index import PrefixIndex
from coordinator.workers.snapshot import PoolName, PoolSnapshot, Worker
from engine.worker.messages import prompt_fit_message, step_fit_message
from splitserve.v1 import registry_pb2

REPORT_S = 0.5
SOON_S = 0.1
"""Report intervals, seconds, as in `splitserve.client.registry_client`: the heartbeat, and the least distance of two
reports when only the cache has changed."""
MODEL = Model("trace", "trace", 2**24, 2**24, (BLOCK_TOKENS,))
_GOLDEN = 0.618


class SimulatedRegistry:
    """The replicas in rotation, each with what it has last reported: loads and prefix caches.

    KV blocks of workers with a prefix index are those of the trace, 512 tokens each; others' are an engine's. For each
    sequence admission counts a partly filled block and one to grow: 1,024 tokens would double a chat's context.
    """

    def __init__(self, engine: EngineModel, orders_prompts: bool = True) -> None:
        """`orders_prompts`: replicas serve those first that can be in time."""
        self._engine, self._orders_prompts = engine, orders_prompts
        self.loads = LoadLedger()
        self.snapshot = PoolSnapshot()
        self.index = PrefixIndex()
        self.prefill: dict[str, PrefillReplica] = {}
        self.decode: dict[str, DecodeReplica] = {}
        """By name, those in rotation."""
        self._workers: dict[str, Worker] = {}
        self._rotated: list[str] = []
        self._due: list[tuple[float, str]] = []
        """Heap of (due time, replica). Entries of replicas that have reported since are skipped."""
        self._reported_s: dict[str, float] = {}
        self._sequence: dict[str, int] = {}

    def rotate(
        self, prefill: Sequence[PrefillReplica], decode: Sequence[DecodeReplica], now_s: float
    ) -> None:
        """Sets the replicas in rotation; neutral ones are among both kinds. New ones report at once."""
        before = self.prefill.keys() | self.decode.keys()
        self.prefill = {replica.name: replica for replica in prefill}
        self.decode = {replica.name: replica for replica in decode}
        named: dict[str, PrefillReplica | DecodeReplica] = {replica.name: replica for replica in prefill}
        named |= {replica.name: replica for replica in decode}
        everyone = list(named.values())
        self._due = [(at_s, name) for at_s, name in self._due if self._replica(name) is not None]
        heapify(self._due)
        for replica in everyone:
            if replica.name not in self._workers:
                self._register(replica)
            elif isinstance(replica, NeutralReplica):
                worker = self._workers[replica.name]
                if worker.pool != replica.leans:
                    self.loads.lean(worker.key, replica.leans)
                    self._workers[replica.name] = dataclasses.replace(worker, pool=replica.leans)
            if replica.name not in before:
                self._report(replica, now_s)
        agents = frozenset(self.decode)
        for name in self.prefill:
            self._workers[name] = dataclasses.replace(self._workers[name], connected_agents=agents - {name})
        self._rotated = [replica.name for replica in everyone]
        self.snapshot = PoolSnapshot(tuple(self._workers[name] for name in self._rotated))

    def ended(self, replica: SimulatedReplica) -> None:
        """Forgets a replica that has ended."""
        if (worker := self._workers.pop(replica.name, None)) is not None:
            self.loads.remove(worker.key)
            self.index.forget(worker.key)

    @property
    def next_report_s(self) -> float:
        """When the next report is due, as far as known; infinity: never."""
        return self._due[0][0] if self._due else float("inf")

    @property
    def knows_caches(self) -> bool:
        """Whether the index has all that replicas hold: they tell it, and none shares a cache that does not."""
        return any(replica.tells_cache for replica in self.prefill.values()) and not self.index.gaps.any

    def take_reports(self, now_s: float) -> None:
        """Processes the reports that are due."""
        while self._due and self._due[0][0] <= now_s:
            at_s, name = heappop(self._due)
            replica = self._replica(name)
            if replica is not None and at_s == self._reported_s[name] + REPORT_S:
                self._report(replica, now_s)

    def take_cache_changes(self, now_s: float) -> None:
        """Processes the reports that changes of the prefix caches cause."""
        for prefill in self.prefill.values():
            if prefill.cache_has_changed and now_s >= self._reported_s[prefill.name] + SOON_S:
                self._report(prefill, now_s)

    def _replica(self, name: str) -> PrefillReplica | DecodeReplica | None:
        return self.prefill.get(name) or self.decode.get(name)

    def _register(self, replica: PrefillReplica | DecodeReplica) -> None:
        pool: PoolName = "prefill" if isinstance(replica, PrefillReplica) else "decode"
        if neutral := isinstance(replica, NeutralReplica):
            pool = replica.leans
        worker = Worker(
            worker_id=replica.name,
            epoch=1,
            pool=pool,
            address="simulated",
            model=MODEL,
            agent_id=replica.name,
            transport="simulated",
            block_size_tokens=self._block_tokens(replica.name),
            max_running_requests=round(self._engine.max_running_requests * replica.speed),
            reported=True,
            output_open=True,
            block_bytes=self._block_tokens(replica.name) * self._engine.kv_bytes_per_token,
            paces_prompts=self._orders_prompts,
            host_id="simulated",
            neutral=neutral,
        )
        self.loads.add(worker)
        if (prefill := self.prefill.get(replica.name)) is not None:
            self._tell_cache(prefill, worker)
            worker = dataclasses.replace(worker, prefix_slot=self.index.slot_of(worker.key))
        self._workers[replica.name] = worker

    def _block_tokens(self, name: str) -> int:
        """Tokens of a worker's KV block."""
        return BLOCK_TOKENS if name in self.prefill else KV_BLOCK_TOKENS

    def _report(self, replica: PrefillReplica | DecodeReplica, now_s: float) -> None:
        worker, load = self._workers[replica.name], registry_pb2.WorkerLoad()
        prefill, decode = self.prefill.get(replica.name), self.decode.get(replica.name)
        if decode is not None:
            step_s = decode.step_s or self.loads.decode[worker.key].measured_step_s
            load.CopyFrom(decode_load(decode, self._engine, step_s, worker.block_size_tokens))
        if prefill is not None:
            self._tell_cache(prefill, worker)
            add_prompts(load, prefill)
        self.loads.on_report(worker.key, load)
        if replica.name not in self._reported_s:
            # Staggers the reports of replicas that started together.
            now_s -= len(self._workers) * _GOLDEN % REPORT_S
        self._reported_s[replica.name] = now_s
        heappush(self._due, (now_s + REPORT_S, replica.name))

    def _tell_cache(self, replica: PrefillReplica, worker: Worker) -> None:
        if not replica.tells_cache:
            return
        sequence = self._sequence.get(worker.worker_id, 0) + 1
        if not replica.cache_has_changed and sequence > 1:
            return
        self._sequence[worker.worker_id] = sequence
        stored, removed = replica.take_cache_changes()
        events = registry_pb2.CacheEvents(
            sequence=sequence, cleared=sequence == 1, removed=_names(removed), stored=_names(stored)
        )
        self.index.apply(worker.key, events)


def add_prompts(load: registry_pb2.WorkerLoad, replica: PrefillReplica) -> None:
    """Adds what a replica computes for others."""
    load.waiting_requests += replica.waiting
    load.running_requests += replica.prompts - replica.waiting
    load.waiting_tokens += replica.queued_tokens
    load.prefill_tokens_per_second = replica.prefill_tokens_per_s
    load.lent_speedup = replica.lent_speedup
    if (fit := prompt_fit_message(replica.prompt_fit)) is not None:
        load.prompt_fit.CopyFrom(fit)


def decode_load(
    replica: DecodeReplica, engine: EngineModel, step_s: float, block_tokens: int
) -> registry_pb2.WorkerLoad:
    """The report of a decode replica."""
    used = int(replica.context_tokens) // block_tokens
    total = int(engine.kv_capacity_tokens * replica.speed) // block_tokens
    return registry_pb2.WorkerLoad(
        total_blocks=total,
        free_blocks=max(0, total - used),
        referenced_blocks=used,
        running_requests=replica.running,
        streams=replica.running,
        waiting_reservations=replica.waiting_reservations,
        waiting_tokens=replica.local_tokens,
        decode_step_ms=step_s * 1e3,
        prompt_fit=prompt_fit_message(replica.prompt_fit),
        step_fit=step_fit_message(replica.step_fit),
        lent_speedup=replica.lent_speedup,
    )


def _names(blocks: Sequence[int]) -> bytes:
    return array("Q", blocks).tobytes()
