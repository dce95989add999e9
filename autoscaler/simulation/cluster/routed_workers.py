"""Adapter: the coordinator's router on simulated replicas, which report as real workers do.

Reports are due every half second, and 100 ms after a cache has changed. They are processed lazily, when the next
request is routed, so a report that nobody would read costs nothing. All prefill replicas reach all decode replicas.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from autoscaler.simulation.cluster.neutral_replicas import SimulatedLeanings
from autoscaler.simulation.cluster.replica import (
    DecodeReplica,
    PrefillReplica,
    SimulatedReplica,
    SimulatedRequest,
    add_prompts,
    decode_load,
)
from autoscaler.simulation.cluster.virtual_engine import KV_BLOCK_TOKENS
from autoscaler.simulation.traces.trace import BLOCK_TOKENS
from autoscaler.sizing.engine_model import EngineModel
from coordinator.request.estimates import DEFAULT_OUTPUT_TOKENS
from coordinator.request.state import RequestEstimate
from coordinator.routing.local_prefill import HandoffMeter, LocalPrefillFacts, local_prefill_tokens
from coordinator.routing.prefix_router import PrefixRouter
from coordinator.routing.prompt_book import BookedPrompt, PromptBook
from coordinator.routing.prompt_placement import PromptPlacement
from coordinator.routing.router import Pair, Router, RoutingRequest
from coordinator.routing.scores import prefill_score_s
from coordinator.workers.catalog import Model
from coordinator.workers.load_ledger import ExpectedPrompt, LoadLedger
from coordinator.workers.prefix_index.hits import NO_HITS
from coordinator.workers.prefix_index.index import PrefixIndex
from coordinator.workers.snapshot import PoolName, PoolSnapshot, Worker, WorkerKey
from engine.pacing.token_clock import ServiceTargets
from splitserve.v1 import registry_pb2

REPORT_S = 0.5
SOON_S = 0.1
"""Report intervals, seconds, as in `splitserve.client.registry_client`: the heartbeat, and the least distance of two
reports when only the cache has changed."""
MODEL = Model("trace", "trace", 2**24, 2**24, (BLOCK_TOKENS,))
_OUTPUT_MEMORY = 64
"""Number of recent answers, approximately, that the expected output length averages over."""
_GOLDEN = 0.618


class RoutedRequest(NamedTuple):
    """Where a request goes."""

    replicas: tuple[PrefillReplica | None, DecodeReplica | None]
    """Who computes its prompt for others, and who decodes. No decode replica for answers of one token, and no prefill
    replica where decode computes the prompt itself."""
    keys: tuple[WorkerKey, WorkerKey | None]
    """The pair, also where decode computes the prompt itself."""


class RoutedWorkers:
    """Presents the replicas in rotation as workers to the coordinator's router, load ledger and prefix index.

    KV blocks of workers with a prefix index are those of the trace, 512 tokens each; others' are an engine's. For each
    sequence admission counts a partly filled block and one to grow: 1,024 tokens would double a chat's context.
    """

    def __init__(
        self,
        engine: EngineModel,
        router: Router | None = None,
        colocated: bool = False,
        hybrid: ServiceTargets | None = None,
        orders_prompts: bool = True,
    ) -> None:
        """`colocated`: decode replicas compute all prompts. `hybrid`: requests have these targets, and the pair
        policy says who computes their prompts. `orders_prompts`: replicas serve those first that can be in time."""
        self._engine, self._orders_prompts = engine, orders_prompts
        self._colocated = colocated
        self._router = PrefixRouter() if router is None else router
        self.loads = LoadLedger()
        self.snapshot = PoolSnapshot()
        self._index = PrefixIndex()
        self._hybrid, self._book = hybrid, PromptBook()
        self._placement = PromptPlacement(self.loads, self._book)
        self._meter = HandoffMeter()
        self._turn = -1
        self._expected_output, self._answers = float(DEFAULT_OUTPUT_TOKENS), 0
        self._workers: dict[str, Worker] = {}
        self._rotated: list[str] = []
        self.leanings = SimulatedLeanings(hybrid)
        self._prefill: dict[str, PrefillReplica] = {}
        self._decode: dict[str, DecodeReplica] = {}
        self._due: list[tuple[float, str]] = []
        """Heap of (due time, replica). Entries of replicas that have reported since are skipped."""
        self._reported_s: dict[str, float] = {}
        self._sequence: dict[str, int] = {}
        self._expected: dict[SimulatedRequest, ExpectedPrompt] = {}
        """By request: prompts that wait for KV blocks on decode."""

    def rotate(
        self,
        prefill: Sequence[PrefillReplica],
        decode: Sequence[DecodeReplica],
        now_s: float,
        leaning: Mapping[str, PoolName] | None = None,
    ) -> None:
        """Sets the replicas in rotation. New ones report at once. `leaning`: where neutral replicas lean at first, by
        their names; they are among both kinds."""
        self.leanings.first = leaning or {}
        before = self._prefill.keys() | self._decode.keys()
        self._prefill = {replica.name: replica for replica in prefill}
        self._decode = {replica.name: replica for replica in decode}
        named: dict[str, PrefillReplica | DecodeReplica] = {replica.name: replica for replica in prefill}
        named |= {replica.name: replica for replica in decode}
        everyone = list(named.values())
        self._due = [(at_s, name) for at_s, name in self._due if self._replica(name) is not None]
        heapify(self._due)
        for replica in everyone:
            if replica.name not in self._workers:
                self._register(replica)
            if replica.name not in before:
                self._report(replica, now_s)
        agents = frozenset(self._decode)
        for name in self._prefill:
            self._workers[name] = dataclasses.replace(self._workers[name], connected_agents=agents - {name})
        self._rotated = [replica.name for replica in everyone]
        self.snapshot = PoolSnapshot(tuple(self._workers[name] for name in self._rotated))

    def ended(self, replica: SimulatedReplica) -> None:
        """Forgets a replica that has ended."""
        if (worker := self._workers.pop(replica.name, None)) is not None:
            self.loads.remove(worker.key)
            self._index.forget(worker.key)

    def answered(self, request: SimulatedRequest) -> None:
        """Updates the expected output length with a complete answer, as `coordinator.request.estimates` does."""
        self._answers = min(self._answers + 1, _OUTPUT_MEMORY)
        self._expected_output += (request.output_tokens - self._expected_output) / self._answers

    def reserved(self, request: SimulatedRequest) -> None:
        """Decode has reserved KV for the request: its prompt now counts as sent to the prefill worker."""
        if (expected := self._expected.pop(request, None)) is not None:
            expected.begin()

    def withdrawn(self, request: SimulatedRequest) -> None:
        """The attempt is over before its end: one of its replicas is gone."""
        if (expected := self._expected.pop(request, None)) is not None:
            expected.withdraw()

    def choose(self, request: SimulatedRequest, now_s: float, lending: bool) -> RoutedRequest | None:
        """Chooses a pair of replicas for a request; None while a pool has no replica in rotation. `lending`: decode
        computes short prompts."""
        self._turn += 1
        self._meter.count_arrival(now_s)
        self.take_reports(now_s)
        self._look_at_leanings(now_s)
        if request.block_ids:
            self._take_cache_changes(now_s)
        routing_request = RoutingRequest(
            MODEL.name,
            request.prompt_tokens,
            request.output_tokens > 1,
            turn=self._turn,
            hits=self._index.hits(request.block_ids, now_s) if request.block_ids else NO_HITS,
            expected_output_tokens=self._expected_output,
        )
        pair = self._router.choose_pair(self.snapshot, self.loads, routing_request, now_s)
        if pair is None:
            return None
        if self._hybrid is not None:
            pair = self._placed(pair, routing_request, request, now_s)
        uncached_tokens = request.prompt_tokens - pair.cost.cached_tokens
        if request.block_ids:
            self._index.expect([pair.prefill.key], request.block_ids, now_s)
        prefill = self._prefill[pair.prefill.worker_id]
        if pair.decode is None:
            self.loads.count_prompt(pair.prefill.key, uncached_tokens)
            return RoutedRequest((prefill, None), (pair.prefill.key, None))
        expected = self.loads.expect(pair.prefill.key, uncached_tokens)
        if expected is not None:
            self._expected[request] = expected
        self.loads.count_stream(pair.decode.key, request.prompt_tokens)
        decode = self._decode[pair.decode.worker_id]
        is_local = (
            self._colocated
            or pair.is_own
            or bool(pair.local_tokens)
            or (lending and uncached_tokens <= self._local_tokens(pair, pair.decode, uncached_tokens, now_s))
        )
        if is_local:
            if expected is not None:
                self._expected.pop(request).withdraw()
            return RoutedRequest((None, decode), (pair.prefill.key, pair.decode.key))
        return RoutedRequest((prefill, decode), (pair.prefill.key, pair.decode.key))

    def _placed(
        self, pair: Pair, routing_request: RoutingRequest, request: SimulatedRequest, now_s: float
    ) -> Pair:
        """The pair by the policy, with its prompt in the book until `first_token`."""
        targets = self._hybrid
        assert targets is not None
        due_s = request.arrival_s + (targets.ttft_s if targets.ttft_s is not None else float("inf"))
        pair = self._placement.placed(pair, routing_request, self.snapshot, due_s, targets.tpot_s, now_s)
        worker = pair.decode if pair.local_tokens and pair.decode is not None else pair.prefill
        cached = pair.cost.decode_cached_tokens if pair.local_tokens else pair.cost.cached_tokens
        decode = None if pair.decode is None else pair.decode.key
        prompt = BookedPrompt(max(1, request.prompt_tokens - cached), cached, due_s, 0, decode)
        self._book.place(_name_of(request), worker.key, prompt, now_s)
        return pair

    def _look_at_leanings(self, now_s: float) -> None:
        moved = self.leanings.look(self.snapshot.workers, self.loads, now_s)
        if moved is not None:
            name, pool = moved
            self._workers[name] = dataclasses.replace(self._workers[name], pool=pool)
            self.snapshot = PoolSnapshot(tuple(self._workers[each] for each in self._rotated))

    def first_token(self, request: SimulatedRequest, now_s: float) -> None:
        """The prompt is computed."""
        self._book.remove(_name_of(request), now_s)

    def _local_tokens(self, pair: Pair, decode: Worker, tokens: int, now_s: float) -> int:
        """As `coordinator.routing.local_prefill.facts_of_pair`, with the handoff cost of the engine model."""
        rate = self.loads.prefill[pair.prefill.key].measured_rate
        if not rate:
            return 0
        load = self.loads.decode[decode.key]
        facts = LocalPrefillFacts(
            split_s=prefill_score_s(pair.queued_tokens, tokens, rate) + self._engine.handoff_s,
            tokens_per_s=rate,
            waiting_tokens=load.waiting_prompt_tokens,
            running_requests=load.streams,
            arrivals_per_s=self._meter.arrivals_per_s(now_s) / pair.decode_candidates,
        )
        return local_prefill_tokens(facts)

    @property
    def decode_replicas(self) -> Iterable[DecodeReplica]:
        """The decode replicas in rotation."""
        return self._decode.values()

    @property
    def next_report_s(self) -> float:
        """When the next report is due, as far as known; infinity: never."""
        return self._due[0][0] if self._due else float("inf")

    def estimate(self, request: SimulatedRequest, now_s: float) -> RequestEstimate:
        """The estimate for a request that arrives now, as `coordinator.request.estimates` makes it."""
        hits = self._index.hits(request.block_ids, now_s) if request.block_ids else NO_HITS
        held_tokens = max((depth for depth, _ in hits.levels), default=0) * BLOCK_TOKENS
        uncached = request.prompt_tokens - min(held_tokens, request.prompt_tokens - 1)
        return RequestEstimate(self._expected_output, float(uncached), hits)

    def take_reports(self, now_s: float) -> None:
        """Processes the reports that are due."""
        while self._due and self._due[0][0] <= now_s:
            at_s, name = heappop(self._due)
            replica = self._replica(name)
            if replica is not None and at_s == self._reported_s[name] + REPORT_S:
                self._report(replica, now_s)

    def _take_cache_changes(self, now_s: float) -> None:
        """Processes the reports that changes of the prefix caches cause."""
        for prefill in self._prefill.values():
            if prefill.cache_has_changed and now_s >= self._reported_s[prefill.name] + SOON_S:
                self._report(prefill, now_s)

    def _replica(self, name: str) -> PrefillReplica | DecodeReplica | None:
        return self._prefill.get(name) or self._decode.get(name)

    def _register(self, replica: PrefillReplica | DecodeReplica) -> None:
        pool: PoolName = "prefill" if isinstance(replica, PrefillReplica) else "decode"
        pool = self.leanings.first.get(replica.name, pool)
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
            neutral=replica.name in self.leanings.first,
        )
        self.loads.add(worker)
        if (prefill := self._prefill.get(replica.name)) is not None:
            self._tell_cache(prefill, worker)
            worker = dataclasses.replace(worker, prefix_slot=self._index.slot_of(worker.key))
        self._workers[replica.name] = worker

    def _block_tokens(self, name: str) -> int:
        """Tokens of a worker's KV block."""
        return BLOCK_TOKENS if name in self._prefill else KV_BLOCK_TOKENS

    def _report(self, replica: PrefillReplica | DecodeReplica, now_s: float) -> None:
        worker, load = self._workers[replica.name], registry_pb2.WorkerLoad()
        prefill, decode = self._prefill.get(replica.name), self._decode.get(replica.name)
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
        self._index.apply(worker.key, events)


def _name_of(request: SimulatedRequest) -> str:
    return str(id(request))


def _names(blocks: Sequence[int]) -> bytes:
    return array("Q", blocks).tobytes()
