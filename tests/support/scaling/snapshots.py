"""Snapshots of pools for tests of policies: a steady load, and what each test changes about it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoscaler.snapshot import (
    ArrivalBucket,
    DecodeSignals,
    LinkSignals,
    PrefillSignals,
    Replica,
    ReplicaState,
    Snapshot,
)
from splitserve.histograms import Histogram
from splitserve.latency_model import DecodeLatency


def replicas(
    pool: str, ready: int, starting: int = 0, standby: int = 0, since_s: float = 0.0
) -> tuple[Replica, ...]:
    """So many replicas in each state."""
    states = (
        [ReplicaState.READY] * ready + [ReplicaState.STARTING] * starting + [ReplicaState.STANDBY] * standby
    )
    return tuple(Replica(f"{pool}-{i}", state, since_s) for i, state in enumerate(states))


@dataclass(frozen=True)
class Load:
    """Arrivals as a function of time: requests a second, tokens of each."""

    requests_per_s: float = 10.0
    prompt_tokens: int = 1000
    output_tokens: float = 200.0
    bursts: tuple[tuple[float, float, float], ...] = field(default=())
    """(from, until, factor) on the requests."""

    def bucket(self, start_s: float, length_s: float) -> ArrivalBucket:
        """What arrived in one bucket, evenly spread."""
        factor = 1.0
        for since, until, times in self.bursts:
            if since <= start_s < until:
                factor = times
        requests = round(self.requests_per_s * factor * length_s)
        tokens = requests * self.prompt_tokens
        return ArrivalBucket(start_s, length_s, requests, tokens, tokens, requests * self.output_tokens)


def arrivals(
    load: Load, now_s: float, since_s: float = 0.0, length_s: float = 1.0
) -> tuple[ArrivalBucket, ...]:
    """The buckets from `since_s` until now."""
    count = int((now_s - since_s) / length_s)
    return tuple(load.bucket(since_s + i * length_s, length_s) for i in range(count))


STEP = DecodeLatency(0.01, 0.0005, 0.0)


def snapshot(
    now_s: float = 1800.0,
    load: Load | None = None,
    prefill: int = 4,
    decode: int = 4,
    prefill_latency_s: float | None = 0.3,
    tpot_s: float | None = 0.03,
    **changes: object,
) -> Snapshot:
    """Pools of so many ready replicas under a steady load; `changes` are put into the snapshot as they are.

    A prefill replica computes 5000 tokens a second, a decode replica holds 200,000 KV tokens.
    """
    latency = None if prefill_latency_s is None else Histogram.of([prefill_latency_s] * 100)
    tpot = None if tpot_s is None else Histogram.of([tpot_s] * 100)
    base = Snapshot(
        now_s,
        PrefillSignals(
            replicas("p", prefill), tokens_per_s=5000.0, latency=latency, ttft=latency, cold_start_s=60.0
        ),
        DecodeSignals(
            replicas("d", decode),
            kv_capacity_tokens=200_000,
            max_running_requests=64,
            step=STEP,
            tpot=tpot,
            cold_start_s=60.0,
        ),
        LinkSignals(10.0, 100_000),
        arrivals(load or Load(), now_s),
    )
    return replace(base, **changes)  # type: ignore[arg-type]
