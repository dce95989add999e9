"""The simulated coordinator: replicas as workers, which report as real workers do, behind the production router.

Reports are due every half second, and 100 ms after a cache has changed. They are processed lazily, when the next
request is routed, so a report that nobody would read costs nothing.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from autoscaler.simulation.cluster.replica import SimulatedReplica, SimulatedRequest
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.trace import BLOCK_TOKENS
from coordinator.request.state import DEFAULT_OUTPUT_TOKENS, RequestEstimate
from coordinator.routing.prefix_router import PrefixRouter
from coordinator.routing.router import Router, RoutingRequest, local_tokens_of_pair
from coordinator.workers.load import Flight, WorkerLoads
from coordinator.workers.prefix_index import NO_HITS, PrefixHits, PrefixIndex
from coordinator.workers.snapshot import Model, PoolSnapshot, Worker
from splitserve.v1 import registry_pb2

REPORT_S = 0.5
SOON_S = 0.1
"""Report intervals in seconds, as in `splitserve.client.registry_client`: the heartbeat, and the shortest time between
two reports when only the cache has changed."""
MODEL = Model("trace", "trace", 2**24, 2**24, BLOCK_TOKENS)
KV_BLOCK_TOKENS = 16
"""Block size of the simulated engines."""
_GOLDEN = 0.618
_OUTPUT_MEMORY = 64
"""Number of recent answers, approximately, that the expected output length averages over."""


class RoutedRequest(NamedTuple):
    """Where a request goes."""

    prefill: SimulatedReplica | None
    """Computes the prompt and hands it off; None when the decode replica computes it."""
    decode: SimulatedReplica | None
    """None for answers of one token."""
    relieves_prefill: bool
    """Whether the decode replica computes the prompt only because prompts wait at the prefill replica."""


class SimulatedCoordinator:
    """The replicas in rotation as workers of the coordinator: its router, account of work and prefix index, with the
    workers' last reports.

    The prefix index knows prompts by the trace's blocks of 512 tokens. KV is counted in an engine's smaller blocks:
    admission adds a partly filled block and one to grow to each sequence, which would double a chat at 512 tokens.
    """

    def __init__(self, scenario: Scenario, router: Router | None = None) -> None:
        self._scenario, self._engine = scenario, scenario.engine
        self._router = PrefixRouter() if router is None else router
        self._turn = -1
        self._expected_output, self._answers = float(DEFAULT_OUTPUT_TOKENS), 0
        self.loads = WorkerLoads()
        self.snapshot = PoolSnapshot()
        self._index = PrefixIndex()
        self.replicas: dict[str, SimulatedReplica] = {}
        """The replicas in rotation, by name."""
        self._workers: dict[str, Worker] = {}
        self._due: list[tuple[float, str]] = []
        """Heap of (due time, replica). Entries of replicas that have reported since are skipped."""
        self._reported_s: dict[str, float] = {}
        self._sequence: dict[str, int] = {}

    def rotate(self, replicas: Sequence[SimulatedReplica], now_s: float) -> None:
        """Sets the replicas in rotation, with the roles that they have now. New ones report at once."""
        before, self.replicas = self.replicas, {replica.name: replica for replica in replicas}
        self._due = [(at_s, name) for at_s, name in self._due if name in self.replicas]
        heapify(self._due)
        for replica in replicas:
            worker = self._workers.get(replica.name)
            if worker is None:
                self._register(replica)
            elif worker.role != replica.role:
                worker = self._workers[replica.name] = dataclasses.replace(worker, role=replica.role)
                self.loads.take_role(worker)
            if replica.name not in before:
                self._report(replica, now_s)
        agents = frozenset(replica.name for replica in replicas if "decode" in replica.pools)
        for replica in replicas:
            if "prefill" in replica.pools:
                worker = self._workers[replica.name]
                self._workers[replica.name] = dataclasses.replace(worker, connected_agents=agents)
        self.snapshot = PoolSnapshot(tuple(self._workers[replica.name] for replica in replicas))

    def ended(self, replica: SimulatedReplica) -> None:
        """Forgets a replica that has ended."""
        if (worker := self._workers.pop(replica.name, None)) is not None:
            self.loads.remove(worker.key)
            self._index.forget(worker.key)

    @property
    def next_report_s(self) -> float:
        """When the next report is due, as far as known; infinity: never."""
        return self._due[0][0] if self._due else float("inf")

    def take_reports(self, now_s: float) -> None:
        """Processes the reports that are due."""
        while self._due and self._due[0][0] <= now_s:
            at_s, name = heappop(self._due)
            if name in self.replicas and at_s == self._reported_s[name] + REPORT_S:
                self._report(self.replicas[name], now_s)

    def answered(self, request: SimulatedRequest) -> None:
        """Updates the expected output length with a complete answer, as `coordinator.request.state` does."""
        self._answers = min(self._answers + 1, _OUTPUT_MEMORY)
        self._expected_output += (request.output_tokens - self._expected_output) / self._answers

    def reserved(self, request: SimulatedRequest, flight: Flight) -> None:
        """Notes that a decode replica has reserved KV for a request, whose prompt begins now."""
        prefill = flight.prefill if request.prefill is not None else None
        self.loads.prompt_begun(flight, prefill, flight.awaited_tokens)

    def choose(self, request: SimulatedRequest, flight: Flight, now_s: float) -> RoutedRequest | None:
        """Chooses the replicas for a request, and enters it in the account of work; None while a pool has no replica in
        rotation."""
        self._turn += 1
        tokens = request.prompt_tokens
        self.take_reports(now_s)
        if request.block_ids:
            self._take_cache_changes(now_s)
        routing_request = RoutingRequest(
            MODEL.name,
            tokens,
            request.output_tokens > 1,
            turn=self._turn,
            hits=self._hits(request, now_s),
            expected_output_tokens=self._expected_output,
        )
        pair = self._router.choose_pair(self.snapshot, self.loads, routing_request)
        if pair is None:
            return None
        prefill, decode = pair.prefill, pair.decode
        lacking = tokens - min(pair.cost.decode_cached_tokens, tokens - 1)
        mode, tpot_s = self._scenario.local_prefill, self._scenario.tpot_target_s
        choice = mode, pair, tokens, self.loads, tpot_s
        is_local = local_tokens_of_pair(*choice) >= lacking
        relieves_prefill = is_local and not local_tokens_of_pair(*choice, behind_queue=False)
        self.loads.route(
            flight,
            prefill.key,
            decode.key if decode is not None else None,
            tokens - pair.cost.cached_tokens,
            local_tokens=lacking if is_local and not pair.is_own else 0,
        )
        if request.block_ids:
            keys = dict.fromkeys(worker.key for worker in (prefill, decode) if worker is not None)
            self._index.expect(keys, request.block_ids, now_s)
        return RoutedRequest(
            None if is_local else self.replicas[prefill.worker_id],
            None if decode is None else self.replicas[decode.worker_id],
            relieves_prefill,
        )

    def estimate(self, request: SimulatedRequest, now_s: float) -> RequestEstimate:
        """The estimate for a request that arrives now, as `coordinator.request.state` makes it."""
        hits = self._hits(request, now_s)
        held = max((depth for depth, _ in hits.levels), default=0) * KV_BLOCK_TOKENS
        held = min(held, request.prompt_tokens - 1)
        return RequestEstimate(self._expected_output, float(request.prompt_tokens - held), hits)

    def _hits(self, request: SimulatedRequest, now_s: float) -> PrefixHits:
        """The cached part of a prompt on each replica, in KV blocks. The index counts the trace's larger blocks."""
        if not request.block_ids:
            return NO_HITS
        hits = self._index.hits(request.block_ids, now_s)
        blocks = BLOCK_TOKENS // KV_BLOCK_TOKENS
        return PrefixHits(tuple((depth * blocks, slots) for depth, slots in hits.levels))

    def _take_cache_changes(self, now_s: float) -> None:
        """Processes the reports that changes of prefix caches cause."""
        for name, replica in self.replicas.items():
            changed = replica.cache is not None and replica.cache.changes
            if changed and now_s >= self._reported_s[name] + SOON_S:
                self._report(replica, now_s)

    def _register(self, replica: SimulatedReplica) -> None:
        worker = Worker(
            worker_id=replica.name,
            epoch=1,
            role=replica.role,
            address="simulated",
            model=MODEL,
            agent_id=replica.name,
            transport="simulated",
            block_size_tokens=KV_BLOCK_TOKENS,
            max_running_requests=self._engine.max_running_requests,
            reported=True,
            output_open=True,
            block_bytes=KV_BLOCK_TOKENS * self._engine.kv_bytes_per_token,
            host_id="simulated",
        )
        self.loads.take_role(worker)
        self._tell_cache(replica, worker)
        self._workers[replica.name] = dataclasses.replace(worker, prefix_slot=self._index.slot_of(worker.key))

    def _report(self, replica: SimulatedReplica, now_s: float) -> None:
        worker = self._workers[replica.name]
        self._tell_cache(replica, worker)
        self.loads.on_report(worker.key, load_of(replica, self._engine))
        if replica.name not in self._reported_s:
            # Staggers the reports of replicas that started together.
            now_s -= len(self._workers) * _GOLDEN % REPORT_S
        self._reported_s[replica.name] = now_s
        heappush(self._due, (now_s + REPORT_S, replica.name))

    def _tell_cache(self, replica: SimulatedReplica, worker: Worker) -> None:
        """Tells the index which blocks the replica's prefix cache has stored and evicted; the first time all of
        them."""
        if replica.cache is None:
            return
        sequence = self._sequence.get(worker.worker_id, 0) + 1
        if not replica.cache.changes and sequence > 1:
            return
        self._sequence[worker.worker_id] = sequence
        stored, removed = replica.cache.take_changes()
        events = registry_pb2.CacheEvents(
            sequence=sequence, cleared=sequence == 1, removed=_names(removed), stored=_names(stored)
        )
        self._index.apply(worker.key, events)


def load_of(replica: SimulatedReplica, engine: EngineModel) -> registry_pb2.WorkerLoad:
    """The report of a replica."""
    used, total = (
        int(tokens) // KV_BLOCK_TOKENS for tokens in (replica.context_tokens, engine.kv_capacity_tokens)
    )
    return registry_pb2.WorkerLoad(
        total_blocks=total,
        free_blocks=max(0, total - used),
        referenced_blocks=used,
        running_requests=replica.running + replica.prompts.running,
        streams=replica.running,
        waiting_requests=replica.prompts.waiting,
        waiting_reservations=replica.waiting_reservations,
        waiting_tokens=replica.prompts.tokens,
        latency=replica.latency.to_proto(),
    )


def _names(blocks: Sequence[int]) -> bytes:
    return array("Q", blocks).tobytes()
