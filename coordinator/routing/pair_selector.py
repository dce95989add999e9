"""Selects the pair of workers for an attempt: builds the routing request, waits for a pair, counts what is sent."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from coordinator.peer_fetch.prefix_offer import PrefixOffer
from coordinator.request.caller import CLASS_RANKS
from coordinator.request.inference_request import InferenceRequest
from coordinator.request.observer import RequestObserver
from coordinator.request.state import NO_WAITS, RequestState
from coordinator.routing.baseline_routers import LeastWaitRouter, RoundRobinRouter
from coordinator.routing.first_workers import FirstWorkers
from coordinator.routing.local_prefill import NO_LIMIT, HandoffMeter, facts_of_pair, local_prefill_tokens
from coordinator.routing.prefix_router import PrefixRouter
from coordinator.routing.prompt_book import PromptBook, PromptBookkeeper, due_of
from coordinator.routing.prompt_placement import PromptPlacement
from coordinator.routing.router import RETRY_AFTER_S, Pair, Router, RoutingRequest, no_pair
from coordinator.workers.load_ledger import ExpectedPrompt
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import WorkerKey
from splitserve.config.coordinator import CoordinatorConfig, Routing
from splitserve.logs import log_event
from splitserve.v1 import decode_pb2

SAME_WORKER_AGAIN_S = 0.25
"""How long a resume waits for workers other than those that failed before it accepts the same ones."""


def make_router(routing: Routing) -> Router:
    """The routing policy for a setting."""
    match routing:
        case "prefix":
            return PrefixRouter()
        case "least-wait":
            return LeastWaitRouter()
        case "round-robin":
            return RoundRobinRouter()


class PairSelector(RequestObserver):
    """Waits for a pair that can serve a request; as an observer, counts attempts as load on their workers."""

    def __init__(
        self,
        config: CoordinatorConfig,
        registry: Registry,
        router: Router,
        first_workers: FirstWorkers,
        offer_of: Callable[[RequestState], PrefixOffer | None] = lambda state: None,
    ) -> None:
        """`offer_of` says what of a prompt could be fetched."""
        self._config, self._first_workers = config, first_workers
        self._wants_candidates = config.records.enabled
        self._registry, self._offer_of = registry, offer_of
        self._router = router
        book = PromptBook()
        hybrid = config.hybrid == "on" and config.local_prefill != "always"
        self._bookkeeper = PromptBookkeeper(book) if hybrid else None
        self._placement = PromptPlacement(registry.loads, book)
        self._meter = HandoffMeter()
        self._turns = itertools.count()
        self._expected: dict[str, ExpectedPrompt] = {}
        """By the id of an attempt that waits for its reservation on decode."""
        self._granted: dict[str, ExpectedPrompt] = {}
        """By the id of an attempt whose prompt its decode worker is to compute."""

    def observers_of(self, request: InferenceRequest) -> Sequence[RequestObserver]:
        """Of a request: this selector, and the book's keeper where the prompt may go before one with a target."""
        if self._bookkeeper is None or not _may_go_first(request):
            return (self,)
        return self, self._bookkeeper

    async def select(self, state: RequestState) -> Pair:
        """A pair for the next attempt, if possible without workers that have failed this request.

        Where workers are started on demand, it waits for the first ones within its own deadline. Raises
        UnavailableError (NO_WORKER, SLOW_LANE) if there is none within `no_worker_wait_s`.
        """
        request = self._routing_request(state)
        wait_s = self._config.no_worker_wait_s
        pair: Pair | None = None
        if state.failed_workers:
            others = dataclasses.replace(request, exclude=frozenset(state.failed_workers))
            settle_s = min(SAME_WORKER_AGAIN_S, wait_s)
            pair = await self._registry.wait_until(lambda: self._choose(others), settle_s)
        if pair is None and self._registry.plan.on_demand and (pair := self._choose(request)) is None:
            await self._first_workers.come(state)
        pair = pair or await self._registry.wait_until(lambda: self._choose(request), wait_s)
        if pair is None:
            raise no_pair(self._registry.snapshot(), request, RETRY_AFTER_S)
        if self._is_placed(state):
            now, targets = time.monotonic(), state.request.targets
            tpot_s = None if targets is None else targets.tpot_s
            failed = frozenset(state.failed_workers)
            snapshot = self._registry.snapshot()
            placed_for = dataclasses.replace(request, exclude=failed) if failed else request
            pair = self._placement.placed(pair, placed_for, snapshot, due_of(state, now), tpot_s, now)
        _log_chosen(pair, request)
        return pair

    def routed(self, state: RequestState) -> None:
        """See RequestObserver. The attempt counts as load on its workers until they report it themselves."""
        request, attempt = state.request, state.attempt
        if self._computes_locally(state, attempt.began_s):
            self._meter.count_arrival(attempt.began_s)
        tokens = len(request.prompt) + len(state.token_ids)
        uncached_tokens = tokens - attempt.expected_cached_tokens
        loads, prefill = self._registry.loads, attempt.prefill.key
        self._registry.count_request(prefill)
        if attempt.decode is None or attempt.decode.key == prefill:
            loads.count_prompt(prefill, uncached_tokens)
        else:
            self._registry.count_request(attempt.decode.key)
            if (expected := loads.expect(prefill, uncached_tokens)) is not None:
                self._expected[attempt.attempt_id] = expected
        if attempt.decode is not None:
            loads.count_stream(attempt.decode.key, tokens)
        for size, keys in request.block_keys.items():
            workers = (attempt.prefill, attempt.decode)
            sent_to = [w.key for w in workers if w is not None and w.block_size_tokens == size]
            self._registry.prefixes.expect(sent_to, keys, attempt.began_s)

    def prefix_missed(self, state: RequestState, tokens: int) -> None:
        """See RequestObserver. They count as to be computed after all."""
        if (expected := self._expected.get(state.attempt.attempt_id)) is not None:
            expected.grow(tokens)
        else:
            self._registry.loads.grow_prompt(state.attempt.prefill.key, tokens)

    def prefilling(self, state: RequestState) -> None:
        """See RequestObserver. Decode has room; the prompt goes to the prefill worker now."""
        self._withdraw_granted(state)  # more of the prompt was missing there than was believed
        if (expected := self._expected.pop(state.attempt.attempt_id, None)) is not None:
            expected.begin()

    def prefilling_locally(self, state: RequestState) -> None:
        """See RequestObserver. The prompt will not be sent to the prefill worker."""
        self._withdraw(state)

    def prefilled_locally(self, state: RequestState, local: decode_pb2.LocalPrefill) -> None:
        """See RequestObserver. The decode worker has computed what it was granted."""
        self._withdraw_granted(state)

    def attempt_ended(self, state: RequestState) -> None:
        """See RequestObserver. A prompt that was never sent to the prefill worker is no longer expected there."""
        self._withdraw(state)
        self._withdraw_granted(state)
        report = state.attempt.report
        if report.transport and self._computes_locally(state, state.attempt.began_s):
            self._meter.record((report.transfer_ms + report.decode_admit_ms) / 1e3)

    def _suspend(self, state: RequestState) -> None:
        if (expected := self._expected.get(state.attempt.attempt_id)) is not None:
            expected.suspend()

    def _withdraw(self, state: RequestState) -> None:
        if (expected := self._expected.pop(state.attempt.attempt_id, None)) is not None:
            expected.withdraw()

    def _withdraw_granted(self, state: RequestState) -> None:
        if (granted := self._granted.pop(state.attempt.attempt_id, None)) is not None:
            granted.withdraw()

    def local_prefill_tokens(self, state: RequestState, pair: Pair) -> int:
        """How many prompt tokens the decode worker may compute itself, by `hybrid`, `local_prefill` and the plan in
        force."""
        now = time.monotonic()
        if pair.is_own:
            return NO_LIMIT
        if pair.decode is None or not self._computes_locally(state, now):
            return 0
        if self._config.local_prefill == "always":
            return NO_LIMIT
        if pair.local_tokens is not None:
            if pair.local_tokens and self._bookkeeper is not None:
                self._bookkeeper.expected_locally(state, pair.cost.decode_cached_tokens)
                self._suspend(state)
            return pair.local_tokens
        if not self._lends_decode(now):
            return 0
        return self._grant(state, pair, pair.decode.key, now)

    def _grant(self, state: RequestState, pair: Pair, decode: WorkerKey, now: float) -> int:
        """Prompt tokens that a lent decode worker may compute. Where that is what it lacks, as far as is known, the
        prompt counts as ahead of later ones there, and not at the prefill worker."""
        loads, tokens = self._registry.loads, len(state.request.prompt) + len(state.token_ids)
        if (load := loads.decode.get(decode)) is None:
            return 0
        facts = facts_of_pair(pair, load, tokens - pair.cost.cached_tokens, self._meter, now)
        granted, lacking = local_prefill_tokens(facts), tokens - pair.cost.decode_cached_tokens
        if granted >= lacking and (expected := loads.expect_locally(decode, lacking)) is not None:
            self._granted[state.attempt.attempt_id] = expected
            self._suspend(state)
        return granted

    def _computes_locally(self, state: RequestState, now: float) -> bool:
        """Whether a decode worker may compute this prompt now. What a handoff takes is measured only then."""
        return self._is_placed(state) or self._lends_decode(now)

    def _lends_decode(self, now: float) -> bool:
        """Whether decode workers may compute prompts now that are not placed by their targets."""
        return self._config.local_prefill != "never" or self._registry.plan.lends(now)

    def _is_placed(self, state: RequestState) -> bool:
        """Whether the pair policy says who computes the prompt."""
        return self._bookkeeper is not None and _has_target(state.request)

    def _routing_request(self, state: RequestState) -> RoutingRequest:
        """The routing policy's view of the next attempt."""
        request, sent = state.request, len(state.token_ids)
        return RoutingRequest(
            request.model.name,
            len(request.prompt) + sent,
            state.needs_decode,
            turn=next(self._turns),
            hits=self._hits(state),
            expected_output_tokens=max(1.0, state.estimate.output_tokens - sent),
            session_id=request.session_id,
            class_rank=CLASS_RANKS[request.caller.priority_class],
            offer=self._offer_of(state),
            computed_at_decode=self._config.local_prefill == "always",
            wants_candidates=self._wants_candidates,
        )

    def _hits(self, state: RequestState) -> PrefixHits:
        """The estimate's hits if they are fresh; caches change while a request waits, so later they are looked up
        again."""
        hits = state.estimate.hits
        if hits is not None and not state.attempts and state.waits is NO_WAITS:
            return hits
        return self._registry.prefixes.hits_of(state.request.block_keys, time.monotonic())

    def _choose(self, request: RoutingRequest) -> Pair | None:
        return self._router.choose_pair(
            self._registry.snapshot(), self._registry.loads, request, time.monotonic()
        )


def _has_target(request: InferenceRequest) -> bool:
    return request.targets is not None and request.targets.ttft_s is not None


def _may_go_first(request: InferenceRequest) -> bool:
    """Whether workers may serve it before a prompt that has a target. Those of the default class without one go before
    batch prompts with one too, which is left out: most requests are such, and pay for no book."""
    return _has_target(request) or CLASS_RANKS[request.caller.priority_class] > 0


def _log_chosen(pair: Pair, request: RoutingRequest) -> None:
    cost = pair.cost
    log_event(
        "route.chosen",
        level=logging.DEBUG,
        prefill_worker=pair.prefill.worker_id,
        decode_worker=pair.decode.worker_id if pair.decode else "",
        queue_ms=cost.queue_s * 1e3,
        prefill_ms=cost.prefill_s * 1e3,
        read_ms=cost.read_s * 1e3,
        transfer_ms=cost.transfer_s * 1e3,
        decode_wait_ms=cost.decode_wait_s * 1e3,
        uncached_tokens=request.prompt_tokens - cost.cached_tokens,
        decode_cached_tokens=cost.decode_cached_tokens,
    )
