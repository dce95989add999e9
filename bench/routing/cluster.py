"""The coordinator's routers on a trace, with simulated pairs of workers and one prefix cache per prefill worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from autoscaler.simulation.cluster.cluster import Cluster
from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.trace import BLOCK_TOKENS, Trace, TraceRequest
from coordinator.routing.router import Router
from splitserve.roles import POOLS


@dataclass(frozen=True, slots=True)
class RoutedRun:
    """The ended requests of a run, and the busy share of the prefill replicas."""

    requests: Sequence[SimulatedRequest]
    utilization: float

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens found in prefix caches."""
        return sum(request.cached for request in self.requests)


def replay(trace: Trace, engine: EngineModel, router: Router, pairs: int, cache_tokens: int) -> RoutedRun:
    """Replays a trace on `pairs` prefill and `pairs` decode replicas, each prefill replica with its own cache."""
    events = EventQueue()
    scenario = Scenario(trace, engine, cache_tokens=cache_tokens, local_prefill="never")
    cluster = Cluster(scenario, events, lambda *_: None, lambda *_: None, router)
    for name in POOLS:
        cluster.order(name, pairs, 0.0, 0.0)
    requests = [SimulatedRequest.of(request) for request in trace.requests]
    for request in requests:
        events.at(request.arrival_s, partial(cluster.arrive, request))
    events.run_until(math.inf)
    busy_s = sum(replica.busy_s for replica in cluster.pool("prefill"))
    ended_s = max(request.finished_s or 0.0 for request in requests)
    return RoutedRun(requests, busy_s / (pairs * ended_s))


def bound_tokens(requests: Sequence[TraceRequest]) -> int:
    """Prompt tokens found in one unbounded cache that stores each prompt on arrival: an upper bound."""
    seen: set[int] = set()
    total = 0
    for request in requests:
        known = next(
            (at for at, block in enumerate(request.block_ids) if block not in seen), len(request.block_ids)
        )
        total += min(known * BLOCK_TOKENS, request.prompt_tokens - 1)
        seen.update(request.block_ids)
    return total
