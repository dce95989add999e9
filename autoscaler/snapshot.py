"""What a scaling decision is made from, at one moment. Plain data; times in seconds on one monotonic clock.

Histograms and arrivals cover a window that ends now. None means: not measured, which is not the same as zero,
and never a reason to scale down.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoscaler.histogram import Histogram

PoolName = Literal["prefill", "decode"]
POOLS: tuple[PoolName, PoolName] = ("prefill", "decode")


class ReplicaState(enum.Enum):
    """How far a replica is."""

    STARTING = "starting"
    """Created, not registered or not connected to its peers yet."""
    STANDBY = "standby"
    """Loaded and connected, out of rotation."""
    READY = "ready"
    """In rotation."""
    DRAINING = "draining"
    """Ends what it has begun, takes nothing new."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One worker as the actuator and the coordinators see it. `name` is its worker id."""

    name: str
    state: ReplicaState
    since_s: float
    """When it came into this state."""
    load: float = 0.0
    """Sequences that it runs or has waiting: the least loaded is drained first."""


@dataclass(frozen=True, slots=True)
class ArrivalBucket:
    """Demand that arrived in [`start_s`, `start_s + length_s`), whether or not it was served since.

    `uncached_tokens` are prompt tokens that had to be computed, by what the coordinator knew at arrival.
    `output_tokens` are expected, from the lengths of earlier answers, not what came out.
    """

    start_s: float
    length_s: float
    requests: int
    prompt_tokens: int
    uncached_tokens: int
    output_tokens: float


@dataclass(frozen=True, slots=True)
class StepFit:
    """Decode step time, fitted: base + per_sequence * batch + per_context_token * KV tokens of the batch, seconds."""

    base_s: float
    per_sequence_s: float
    per_context_token_s: float

    def step_s(self, sequences: float, context_tokens: float) -> float:
        """Duration of a step of so many sequences that hold so many KV tokens together."""
        return self.base_s + self.per_sequence_s * sequences + self.per_context_token_s * context_tokens


@dataclass(frozen=True, slots=True)
class PrefillSignals:
    """The prefill pool. `latency` is queue + compute of a prompt, cold samples left out; `ttft` is what clients saw."""

    replicas: tuple[Replica, ...] = ()
    waiting_requests: int = 0
    backlog_tokens: int = 0
    """Uncached prompt tokens that arrived and are not computed yet, in all replicas."""
    tokens_per_s: float | None = None
    """Prompt tokens that one replica computes a second while it is busy."""
    latency: Histogram | None = None
    ttft: Histogram | None = None
    cold_start_s: float | None = None
    """From the order to start a replica until it was ready, measured."""


@dataclass(frozen=True, slots=True)
class DecodeSignals:
    """The decode pool. `tpot` is per request, its mean time per output token after the first, cold samples left out."""

    replicas: tuple[Replica, ...] = ()
    running_requests: int = 0
    waiting_reservations: int = 0
    context_tokens: int = 0
    """KV tokens of all running sequences and reservations."""
    kv_capacity_tokens: int | None = None
    """KV tokens that one replica holds."""
    max_running_requests: int | None = None
    """Sequences in one replica's batch at most."""
    step: StepFit | None = None
    tpot: Histogram | None = None
    reserve_wait: Histogram | None = None
    """Wait for KV blocks on decode. It counts for this pool, not for prefill, though it delays the first token."""
    cold_start_s: float | None = None


@dataclass(frozen=True, slots=True)
class LinkSignals:
    """The way of the KV cache from prefill to decode."""

    gb_per_s: float | None = None
    """Of one prefill replica's lane, GB/s (10^9 bytes)."""
    kv_bytes_per_token: int | None = None
    transfer: Histogram | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at `now_s`. `arrivals` are contiguous, oldest first, the last one may still be filling."""

    now_s: float
    prefill: PrefillSignals
    decode: DecodeSignals
    link: LinkSignals = LinkSignals()
    arrivals: tuple[ArrivalBucket, ...] = ()
    window_s: float = 60.0
    """Length of the window of all histograms."""
    wall_s: float = 0.0
    """Seconds since the epoch, for schedules and seasons."""
    complete: bool = True
    """False while a coordinator does not answer: its last figures are held for a while and missing after that, so
    nothing here is a reason to scale down."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Further exported metrics by name, for `target` policies; None while unknown."""
