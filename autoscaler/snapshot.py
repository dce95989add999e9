"""The input of a scaling decision: signals at one moment. Plain data; times in seconds on one monotonic clock.

Histograms and arrivals cover a window that ends now. None means not measured, which differs from zero and is never
a reason to scale down.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoscaler.sharing.claims.shared_view import SharedView
from splitserve.histograms import Histogram

PoolName = Literal["prefill", "decode"]
POOLS: tuple[PoolName, PoolName] = ("prefill", "decode")
OTHER_POOL: Mapping[PoolName, PoolName] = {"prefill": "decode", "decode": "prefill"}
PoolClass = tuple[PoolName, str]
"""A pool and the name of one of its replica classes; empty where its replicas are alike."""


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
    neutral: bool = False
    """Whether it serves both pools; it is counted in the one that it leans to."""
    replica_class: str = ""
    """Its class as reported, or as the actuator knows it; empty: the default one."""


@dataclass(frozen=True, slots=True)
class ArrivalBucket:
    """Demand that arrived in [`start_s`, `start_s + length_s`), served or not.

    `uncached_tokens` are prompt tokens to compute, as estimated at arrival. `output_tokens` are expected, from the
    lengths of earlier answers, not measured.
    """

    start_s: float
    length_s: float
    requests: int
    prompt_tokens: int
    uncached_tokens: int
    output_tokens: float


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Decode step time, fitted: base + per_sequence * batch + per_context_token * KV tokens of the batch, seconds."""

    base_s: float
    per_sequence_s: float
    per_context_token_s: float

    def step_s(self, sequences: float, context_tokens: float) -> float:
        """Duration of a step, seconds, for a batch of `sequences` with `context_tokens` KV tokens in total."""
        return self.base_s + self.per_sequence_s * sequences + self.per_context_token_s * context_tokens


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
class ClassSignals:
    """Mean figures of the replicas of one class that have measured them."""

    replicas: int
    """How many of it serve."""
    tokens_per_s: float | None = None
    """Prefill: prompt tokens per second of one busy replica."""
    kv_capacity_tokens: int | None = None
    """Decode: KV capacity of one replica."""
    max_running_requests: int | None = None
    step: StepTimeModel | None = None


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
    wake_s: float | None = None
    """Median time in which replicas that had slept woke up, as they say; None before the first has."""
    classes: Mapping[str, ClassSignals] = field(default_factory=dict)
    """The same by class, as replicas report it."""


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
    step: StepTimeModel | None = None
    tpot: Histogram | None = None
    reserve_wait: Histogram | None = None
    """Wait for KV blocks on decode. It delays the first token, but only this pool can shorten it."""
    cold_start_s: float | None = None
    start: ReplicaStart | None = None
    wake_s: float | None = None
    classes: Mapping[str, ClassSignals] = field(default_factory=dict)
    """Figures by class, as replicas report it."""


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
class LeaningTurn:
    """A neutral worker that a coordinator's planner has moved."""

    name: str
    pool: PoolName
    """Where it leans since."""
    at_s: float
    """When that was seen, on the clock of snapshots."""
    replica_class: str = ""


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
    short: frozenset[PoolClass] = frozenset()
    """Classes of replicas of which no more are to be had now: starts were refused, or failed one after the other."""
    shared: SharedView | None = None
    """What other models on the same inventory have and claim; None where there are none."""
    turns: tuple[LeaningTurn, ...] = ()
    """What coordinators' planners have moved of late, oldest first."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Further exported metrics by name, for `target` policies; None while unknown."""

    def pool(self, name: PoolName) -> PrefillSignals | DecodeSignals:
        """The signals of one pool."""
        return self.prefill if name == "prefill" else self.decode

    @property
    def leanings(self) -> Mapping[str, PoolName]:
        """Where each neutral worker leans that a coordinator knows, by name."""
        pools: tuple[tuple[PoolName, tuple[Replica, ...]], ...] = (
            ("prefill", self.prefill.replicas),
            ("decode", self.decode.replicas),
        )
        return {one.name: pool for pool, there in pools for one in there if one.neutral and one.registered}
