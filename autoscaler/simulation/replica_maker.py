"""Makes simulated replicas as the settings of a cluster say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoscaler.simulation.cluster.decode_replica import ClosedFormDecode
from autoscaler.simulation.cluster.neutral_replicas import NeutralReplica, neutral_replica
from autoscaler.simulation.cluster.prefill_replica import ChunkedPrefill, PrefixCache
from autoscaler.simulation.cluster.replica import (
    DecodeReplica,
    EventQueue,
    PrefillReplica,
    SimulatedRequest,
)
from autoscaler.simulation.cluster.stepped.lent_cores import LentCores
from autoscaler.simulation.cluster.stepped.stepped_replicas import SteppedDecode, SteppedPrefill
from autoscaler.simulation.cluster_settings import ClusterSettings
from autoscaler.sizing.engine_model import EngineModel


@dataclass(frozen=True, slots=True)
class ReplicaCalls:
    """What replicas call, with the request and the time."""

    computed: Callable[[SimulatedRequest, float, float], None]
    """Its prompt is; the second time is when its KV is on decode."""
    reserved: Callable[[SimulatedRequest, float], None]
    decoded: Callable[[SimulatedRequest, float], None]


class ReplicaMaker:
    """Replicas of one cluster."""

    def __init__(self, settings: ClusterSettings, events: EventQueue, calls: ReplicaCalls) -> None:
        self._settings, self._events, self._calls = settings, events, calls
        self._shared_cache = self._new_cache(own=False) if settings.prefix_cache == "pool" else None
        self._cores = LentCores(events, settings.engine.lent_time) if settings.lent_cores else None

    def prefill(self, name: str, now_s: float, engine: EngineModel) -> PrefillReplica:
        """A prefill replica, ordered now."""
        settings, events = self._settings, self._events
        own, computed = settings.prefix_cache == "worker", self._calls.computed
        if settings.steps:
            return SteppedPrefill(
                name, now_s, engine, events, settings.targets, own, computed, cores=self._cores
            )
        cache = self._new_cache(own) if own else self._shared_cache
        return ChunkedPrefill(name, now_s, engine, events, cache, computed)

    def decode(self, name: str, now_s: float, engine: EngineModel) -> DecodeReplica:
        """A decode replica, ordered now."""
        settings, events = self._settings, self._events
        has_cache = settings.colocated and settings.prefix_cache == "worker"
        calls = self._calls.reserved, self._calls.decoded
        if settings.steps:
            parts = settings.targets, has_cache, *calls
            return SteppedDecode(name, now_s, engine, events, *parts, cores=self._cores)
        cache = self._new_cache(own=False) if has_cache else None
        return ClosedFormDecode(name, now_s, engine, events, *calls, cache)

    def neutral(self, name: str, now_s: float) -> NeutralReplica:
        """A neutral replica, ordered now; step by step only."""
        settings, own = self._settings, self._settings.prefix_cache == "worker"
        calls = self._calls.computed, self._calls.reserved, self._calls.decoded
        parts = settings.engine, self._events, settings.targets, own, *calls, self._cores
        return neutral_replica(name, now_s, *parts)

    def _new_cache(self, own: bool) -> PrefixCache:
        tokens = self._settings.cache_tokens or self._settings.engine.kv_capacity_tokens
        # A shared cache cannot tell replicas apart, so its changes are not reported to the router.
        return PrefixCache(tokens, keeps_changes=own)
