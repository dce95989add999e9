"""Adapter: the coordinator's router on simulated replicas, which report as real workers do.

All prefill replicas reach all decode replicas.
"""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.simulation.cluster.replica import (
    DecodeReplica,
    PrefillReplica,
    SimulatedRequest,
)
from autoscaler.simulation.cluster.simulated_registry import MODEL, SimulatedRegistry
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
from coordinator.workers.load_ledger import ExpectedPrompt
from coordinator.workers.prefix_index.hits import NO_HITS
from coordinator.workers.snapshot import Worker, WorkerKey
from engine.pacing.token_clock import ServiceTargets

_OUTPUT_MEMORY = 64
"""Number of recent answers, approximately, that the expected output length averages over."""


class RoutedRequest(NamedTuple):
    """Where a request goes."""

    replicas: tuple[PrefillReplica | None, DecodeReplica | None]
    """Who computes its prompt for others, and who decodes. No decode replica for answers of one token, and no prefill
    replica where decode computes the prompt itself."""
    keys: tuple[WorkerKey, WorkerKey | None]
    """The pair, also where decode computes the prompt itself."""


class RoutedWorkers:
    """Presents the replicas in rotation as workers to the coordinator's router, load ledger and prefix index."""

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
        self._engine = engine
        self.registry = SimulatedRegistry(engine, orders_prompts)
        self._colocated = colocated
        self._router = PrefixRouter() if router is None else router
        self._hybrid, self._book = hybrid, PromptBook()
        self._placement = PromptPlacement(self.registry.loads, self._book)
        self._meter = HandoffMeter()
        self._turn = -1
        self._expected_output, self._answers = float(DEFAULT_OUTPUT_TOKENS), 0
        self._expected: dict[SimulatedRequest, ExpectedPrompt] = {}
        """By request: prompts that wait for KV blocks on decode."""

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
        self.registry.take_reports(now_s)
        if request.block_ids:
            self.registry.take_cache_changes(now_s)
        routing_request = RoutingRequest(
            MODEL.name,
            request.prompt_tokens,
            request.output_tokens > 1,
            turn=self._turn,
            hits=self.registry.index.hits(request.block_ids, now_s) if request.block_ids else NO_HITS,
            expected_output_tokens=self._expected_output,
        )
        pair = self._router.choose_pair(self.registry.snapshot, self.registry.loads, routing_request, now_s)
        if pair is None:
            return None
        if self._hybrid is not None:
            pair = self._placed(pair, routing_request, request, now_s)
        uncached_tokens = request.prompt_tokens - pair.cost.cached_tokens
        if request.block_ids:
            self.registry.index.expect([pair.prefill.key], request.block_ids, now_s)
        prefill = self.registry.prefill[pair.prefill.worker_id]
        if pair.decode is None:
            self.registry.loads.count_prompt(pair.prefill.key, uncached_tokens)
            return RoutedRequest((prefill, None), (pair.prefill.key, None))
        expected = self.registry.loads.expect(pair.prefill.key, uncached_tokens)
        if expected is not None:
            self._expected[request] = expected
        self.registry.loads.count_stream(pair.decode.key, request.prompt_tokens)
        decode = self.registry.decode[pair.decode.worker_id]
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
        pair = self._placement.placed(
            pair, routing_request, self.registry.snapshot, due_s, targets.tpot_s, now_s
        )
        worker = pair.decode if pair.local_tokens and pair.decode is not None else pair.prefill
        cached = pair.cost.decode_cached_tokens if pair.local_tokens else pair.cost.cached_tokens
        decode = None if pair.decode is None else pair.decode.key
        prompt = BookedPrompt(max(1, request.prompt_tokens - cached), cached, due_s, 0, decode)
        self._book.place(_name_of(request), worker.key, prompt, now_s)
        return pair

    def first_token(self, request: SimulatedRequest, now_s: float) -> None:
        """The prompt is computed."""
        self._book.remove(_name_of(request), now_s)

    def _local_tokens(self, pair: Pair, decode: Worker, tokens: int, now_s: float) -> int:
        """As `coordinator.routing.local_prefill.facts_of_pair`, with the handoff cost of the engine model."""
        rate = self.registry.loads.prefill[pair.prefill.key].measured_rate
        if not rate:
            return 0
        load = self.registry.loads.decode[decode.key]
        facts = LocalPrefillFacts(
            split_s=prefill_score_s(pair.queued_tokens, tokens, rate) + self._engine.handoff_s,
            tokens_per_s=rate,
            waiting_tokens=load.waiting_prompt_tokens,
            running_requests=load.streams,
            arrivals_per_s=self._meter.arrivals_per_s(now_s) / pair.decode_candidates,
        )
        return local_prefill_tokens(facts)

    def estimate(self, request: SimulatedRequest, now_s: float) -> RequestEstimate:
        """The estimate for a request that arrives now, as `coordinator.request.estimates` makes it."""
        hits = self.registry.index.hits(request.block_ids, now_s) if request.block_ids else NO_HITS
        held = max((depth for depth, _ in hits.levels), default=0) * BLOCK_TOKENS
        held = min(held, request.prompt_tokens - 1)
        known = held if self.registry.knows_caches else None
        return RequestEstimate(self._expected_output, float(request.prompt_tokens - held), hits, known)


def _name_of(request: SimulatedRequest) -> str:
    return str(id(request))
