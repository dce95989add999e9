"""What routing knows of a request: put together before a pair is chosen, kept up to date after."""

from __future__ import annotations

import itertools
import logging
import time

from coordinator.answer import Answer
from coordinator.output_lengths import OutputLengths
from coordinator.prefix_hits import NO_HITS
from coordinator.prefix_router import PrefixRouter
from coordinator.registry import Registry
from coordinator.routing import LeastWaitRouter, Pair, RoundRobinRouter, Router, RouteRequest
from splitserve.config import Routing
from splitserve.logs import log_event


def make_router(routing: Routing) -> Router:
    """The policy that a setting names."""
    match routing:
        case "prefix":
            return PrefixRouter()
        case "least-wait":
            return LeastWaitRouter()
        case "round-robin":
            return RoundRobinRouter()


class RoutePlanner:
    """Asks the prefix index, and remembers lengths of answers and what was sent where."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lengths = OutputLengths()
        self._turns = itertools.count()

    def request_for(self, answer: Answer) -> RouteRequest:
        """What routing may know of the next attempt at an answer."""
        generation, sent = answer.generation, len(answer.token_ids)
        keys = generation.block_keys
        return RouteRequest(
            generation.model.name,
            len(generation.prompt) + sent,
            answer.needs_decode,
            turn=next(self._turns),
            hits=self._registry.prefixes.hits(keys, time.monotonic()) if keys else NO_HITS,
            expected_output_tokens=max(1.0, self._lengths.expected(generation) - sent),
            session_id=generation.session_id,
            priority=generation.priority,
        )

    def sent(self, answer: Answer, pair: Pair) -> None:
        """The next attempt goes to this pair: it counts there until the workers have reported of it."""
        generation = answer.generation
        tokens = len(generation.prompt) + len(answer.token_ids)
        now = time.monotonic()
        self._registry.note_sent(pair.prefill.key, tokens - pair.parts.cached_tokens)
        if pair.decode is not None:
            self._registry.note_sent(pair.decode.key, tokens)
        if generation.block_keys:
            chosen = [worker.key for worker in (pair.prefill, pair.decode) if worker is not None]
            self._registry.prefixes.expect(chosen, generation.block_keys, now)
        parts = pair.parts
        log_event(
            "route.chosen",
            level=logging.DEBUG,
            prefill_worker=pair.prefill.worker_id,
            decode_worker=pair.decode.worker_id if pair.decode else "",
            queue_ms=parts.queue_s * 1e3,
            prefill_ms=parts.prefill_s * 1e3,
            transfer_ms=parts.transfer_s * 1e3,
            decode_wait_ms=parts.decode_wait_s * 1e3,
            uncached_tokens=tokens - parts.cached_tokens,
            decode_cached_tokens=parts.decode_cached_tokens,
        )

    def ended(self, answer: Answer) -> None:
        """An answer is complete."""
        self._lengths.ended(answer.generation, len(answer.token_ids))
