"""The input of a scaling decision: signals at one moment. Plain data; times in seconds on one monotonic clock.

Histograms and arrivals cover a window that ends now. None means not measured, which differs from zero and is never
a reason to scale down.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from splitserve.histograms import Histogram
from splitserve.latency_model import DecodeLatency

PoolName = Literal["prefill", "decode"]
POOLS: tuple[PoolName, PoolName] = ("prefill", "decode")
OTHER_POOL: Mapping[PoolName, PoolName] = {"prefill": "decode", "decode": "prefill"}


class ReplicaState(enum.Enum):
    """Life cycle of a replica."""

    STARTING = "starting"
    """Created; not registered or not connected to its peers yet."""
    STANDBY = "standby"
    """Loaded and connected, out of rotation."""
    READY = "ready"
    """In rotation."""
    DRAINING = "draining"
    """Finishes its requests, takes no new ones."""
    PREEMPTED = "preempted"
    """As draining, and its machine is taken away: it is replaced now, not when it has gone."""
    OVERDUE = "overdue"
    """Starting for longer than its deadline: no capacity, to be replaced. See `start_watch.py`."""


LEAVING = (ReplicaState.DRAINING, ReplicaState.PREEMPTED)
"""What takes nothing new and will be gone."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One worker as the actuator and the coordinators see it. `name` is its worker id."""

    name: str
    state: ReplicaState
    since_s: float
    """When it entered this state."""
    load: float = 0.0
    """Sequences that run or wait. The least loaded replica is drained first."""
    registered: bool = True
    """Whether a coordinator knows it."""
    ours: bool = True
    """Whether the actuator made or adopted it. Others are capacity, but are never started, moved or ended."""
    both: bool = False
    """Whether its role is `both`: it is listed in both pools, and is capacity that no plan starts, moves or ends."""
    can_change_role: bool = False
    """Whether it can take the other pool's role while it runs."""


@dataclass(frozen=True, slots=True)
class ArrivalBucket:
    """Demand that arrived in [`start_s`, `start_s + length_s`), served or not."""

    start_s: float
    length_s: float
    requests: int
    prompt_tokens: int
    uncached_tokens: int
    """Prompt tokens that prefill workers have to compute, as estimated at arrival: without those that are cached, and
    without the prompts that decode workers compute."""
    output_tokens: float
    """Expected from the lengths of earlier answers, not measured."""
    local_requests: int = 0
    """Of `requests`, those whose prompt a decode worker computes."""

    @property
    def prefill_requests(self) -> int:
        """Requests whose prompt prefill workers have to compute."""
        return self.requests - self.local_requests


@dataclass(frozen=True, slots=True)
class ReplicaStart:
    """The phases of a replica's start that itself sees, in seconds: medians over the replicas of a pool."""

    process_s: float
    """From the start of its process until its code is imported."""
    weights_s: float
    warm_up_s: float

    @property
    def total_s(self) -> float:
        """Without schedule, image and connecting, which a replica does not see."""
        return self.process_s + self.weights_s + self.warm_up_s


@dataclass(frozen=True, slots=True)
class PrefillSignals:
    """The prefill pool. `latency` is queue + compute of a prompt, without cold samples; `ttft` as clients saw it."""

    replicas: tuple[Replica, ...] = ()
    waiting_requests: int = 0
    backlog_tokens: int = 0
    """Uncached prompt tokens not computed yet, in all replicas."""
    tokens_per_s: float | None = None
    """Prompt tokens per second of one busy replica."""
    latency: Histogram | None = None
    ttft: Histogram | None = None
    cold_start_s: float | None = None
    """Measured time from the order of a replica until it was ready, seconds."""
    start: ReplicaStart | None = None
    """The part of it that present replicas have measured themselves."""


@dataclass(frozen=True, slots=True)
class DecodeSignals:
    """The decode pool. `tpot` is per request, the mean time per output token after the first, without cold samples."""

    replicas: tuple[Replica, ...] = ()
    running_requests: int = 0
    waiting_reservations: int = 0
    """Requests that wait for KV blocks, on the workers or held back by the coordinators until there are some."""
    context_tokens: int = 0
    """KV tokens of all running sequences and reservations."""
    kv_capacity_tokens: int | None = None
    """KV capacity of one replica, tokens."""
    max_running_requests: int | None = None
    """Largest batch of one replica, sequences."""
    step: DecodeLatency | None = None
    """How long a decode step takes: the mean of what the workers have fitted."""
    tpot: Histogram | None = None
    reserve_wait: Histogram | None = None
    """Wait for KV blocks on decode. It delays the first token, but only this pool can shorten it."""
    cold_start_s: float | None = None
    start: ReplicaStart | None = None


def lead_s(signals: PrefillSignals | DecodeSignals, given_s: float) -> float:
    """The cold start to plan with, seconds: the measured one; before that the policy's own, and no less than present
    replicas say of theirs."""
    reported_s = signals.start.total_s if signals.start is not None else 0.0
    return signals.cold_start_s or max(given_s, reported_s)


@dataclass(frozen=True, slots=True)
class LinkSignals:
    """The handoff of KV from prefill to decode."""

    gb_per_s: float | None = None
    """Of one prefill replica's lane, GB/s (10^9 bytes)."""
    kv_bytes_per_token: int | None = None
    transfer: Histogram | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All signals at `now_s`. `arrivals` are contiguous, oldest first; the last bucket may be incomplete."""

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
    """False while a coordinator does not answer. Its last figures are kept for a while, then missing: never a reason
    to scale down."""
    gpu_inventory: int | None = None
    """GPUs that the actuator may give to its replicas, used ones included; None where it gives none."""
    acting: bool = True
    """False while plans are not carried out (dry run, another autoscaler holds the lease): only what exists counts."""
    waiting_for_workers: int = 0
    """Requests that wait at the coordinators because a pool has no worker that takes them."""
    in_progress: int = 0
    """All requests between arrival and end at the coordinators, these included."""
    model_known: bool = True
    """False before any coordinator knows the model: none has had a worker of it, or was told of it."""
    foreign: frozenset[str] = frozenset()
    """Registered workers of other models. Nothing else in the snapshot says anything about them."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Further exported metrics by name, for `target` policies; None while unknown."""

    def pool(self, name: PoolName) -> PrefillSignals | DecodeSignals:
        """The signals of one pool."""
        return self.prefill if name == "prefill" else self.decode

    @property
    def roles(self) -> Mapping[str, PoolName]:
        """The pool that each registered worker serves by its role, by name; without those that serve both."""
        return {
            replica.name: pool
            for pool in POOLS
            for replica in self.pool(pool).replicas
            if replica.registered and not replica.both
        }
