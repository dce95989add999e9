"""Makes simulated replicas as the settings of a cluster say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoscaler.simulation.cluster.closed_form_neutral import ClosedFormNeutral
from autoscaler.simulation.cluster.decode_replica import ClosedFormDecode
from autoscaler.simulation.cluster.neutral_replica import NeutralReplica
from autoscaler.simulation.cluster.prefill_replica import ChunkedPrefill, PrefixCache
from autoscaler.simulation.cluster.replica import (
    DecodeReplica,
    EventQueue,
    PrefillReplica,
    SimulatedRequest,
)
from autoscaler.simulation.cluster.stepped.lent_cores import LentCores
from autoscaler.simulation.cluster.stepped.stepped_neutral import stepped_neutral
from autoscaler.simulation.cluster.stepped.stepped_replicas import SteppedDecode, SteppedPrefill
from autoscaler.simulation.cluster_settings import ClusterSettings
from autoscaler.snapshot import PoolName


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

    def prefill(self, name: str, now_s: float, kind: str) -> PrefillReplica:
        """A prefill replica of this class, ordered now."""
        settings, events = self._settings, self._events
        engine = settings.engine_of("prefill", kind)
        own, computed = settings.prefix_cache == "worker", self._calls.computed
        if settings.steps:
            return SteppedPrefill(
                name, now_s, engine, events, settings.targets, own, computed, cores=self._cores
            )
        cache = self._new_cache(own) if own else self._shared_cache
        return ChunkedPrefill(name, now_s, engine, events, cache, computed)

    def decode(self, name: str, now_s: float, kind: str) -> DecodeReplica:
        """A decode replica of this class, ordered now."""
        settings, events = self._settings, self._events
        engine = settings.engine_of("decode", kind)
        has_cache = settings.colocated and settings.prefix_cache == "worker"
        calls = self._calls.reserved, self._calls.decoded
        if settings.steps:
            parts = settings.targets, has_cache, *calls
            return SteppedDecode(name, now_s, engine, events, *parts, cores=self._cores)
        cache = self._new_cache(own=False) if has_cache else None
        return ClosedFormDecode(name, now_s, engine, events, *calls, cache)

    def neutral(self, name: str, now_s: float, leans: PoolName, kind: str) -> NeutralReplica:
        """A neutral replica of this class that leans to this pool, ordered now."""
        settings, own = self._settings, self._settings.prefix_cache == "worker"
        calls = self._calls.computed, self._calls.reserved, self._calls.decoded
        engine, events = settings.engine_of(leans, kind), self._events
        if settings.steps:
            parts = settings.targets, own, *calls, self._cores
            return stepped_neutral(name, now_s, leans, engine, events, *parts)
        cache = self._new_cache(own) if own else self._shared_cache
        return ClosedFormNeutral(name, now_s, leans, engine, events, cache, *calls)

    def _new_cache(self, own: bool) -> PrefixCache:
        tokens = self._settings.cache_tokens or self._settings.engine.kv_capacity_tokens
        # A shared cache cannot tell replicas apart, so its changes are not reported to the router.
        return PrefixCache(tokens, keeps_changes=own)
