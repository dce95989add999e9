"""The input of a scaling decision: signals at one moment. Plain data; times in seconds on one monotonic clock.

Histograms and arrivals cover a window that ends now. None means not measured, which differs from zero and is never
a reason to scale down.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from splitserve.histograms import Histogram
from splitserve.latency_model import DecodeLatency
from splitserve.roles import POOLS, PoolName


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
    """Its machine is taken away. It takes no new requests and is replaced now, not once it has gone."""
    OVERDUE = "overdue"
    """Starting for longer than its deadline: no capacity, to be replaced. See `start_watch.py`."""


UP = (ReplicaState.READY, ReplicaState.STANDBY)
LEAVING = (ReplicaState.DRAINING, ReplicaState.PREEMPTED)
"""States of a replica that takes no new requests and will be gone."""


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
    """Whether the actuator started or adopted it. Other replicas are capacity that no plan starts, moves or ends."""
    both: bool = False
    """Whether its role is `both`. It is listed in both pools as capacity that no plan starts, moves or ends."""
    can_change_role: bool = False
    """Whether it can take the other pool's role while it runs."""
    created_wall_s: float = 0.0
    """When the actuator created it, seconds since the epoch."""
    placeholder: bool = False
    """Ordered, but not created yet. The replica that is created will have another name."""
    reachable: bool = True
    """Whether its host answers."""

    @property
    def managed(self) -> bool:
        """Whether plans start, move and end it."""
        return self.ours and not self.both


@dataclass(frozen=True, slots=True)
class ArrivalBucket:
    """Demand that arrived in [`start_s`, `start_s + length_s`), served or not."""

    start_s: float
    length_s: float
    requests: int
    prompt_tokens: int
    uncached_tokens: int
    """Prompt tokens that prefill workers have to compute, as estimated at arrival: neither cached nor left to decode
    workers."""
    output_tokens: float
    """Expected from the lengths of earlier answers, not measured."""
    local_requests: int = 0
    """Requests, of `requests`, whose prompt a decode worker computes."""

    @property
    def prefill_requests(self) -> int:
        """Requests whose prompt prefill workers have to compute."""
        return self.requests - self.local_requests


@dataclass(frozen=True, slots=True)
class ReplicaStart:
    """The phases of a start that a replica measures itself, in seconds: medians over the replicas of a pool."""

    process_s: float
    """From the start of its process until its code is imported."""
    weights_s: float
    warm_up_s: float

    @property
    def total_s(self) -> float:
        """All phases that a replica measures: neither scheduling nor pulling the image nor connecting to peers."""
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
    """The phases of starts that present replicas have measured."""


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
    cold_start_s: float | None = None
    start: ReplicaStart | None = None


def lead_s(signals: PrefillSignals | DecodeSignals, given_s: float) -> float:
    """The cold start to plan with, seconds: the measured one; before any is measured the policy's `given_s`, but no
    less than the phases that present replicas report."""
    reported_s = signals.start.total_s if signals.start is not None else 0.0
    return signals.cold_start_s or max(given_s, reported_s)


@dataclass(frozen=True, slots=True)
class LinkSignals:
    """The handoff of KV from prefill to decode."""

    gb_per_s: float | None = None
    """Speed of one prefill replica's lane, 10^9 bytes a second."""
    kv_bytes_per_token: int | None = None


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
    """False while a coordinator does not answer. Its last figures are kept for a while and are missing afterwards,
    which is never a reason to scale down."""
    gpu_inventory: int | None = None
    """GPUs that the actuator may give to its replicas, used ones included; None where it assigns no GPUs."""
    acting: bool = True
    """False while plans are not carried out (dry run, another autoscaler holds the lease)."""
    waiting_for_workers: int = 0
    """Requests that wait at the coordinators because a pool has no worker that takes them."""
    in_progress: int = 0
    """All requests between arrival and end at the coordinators, waiting ones included."""
    model_known: bool = True
    """False until a coordinator knows the model, from a worker or from an autoscaler."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Further exported metrics by name, for `target` policies; None while unknown."""

    def pool(self, name: PoolName) -> PrefillSignals | DecodeSignals:
        """The signals of one pool."""
        return self.prefill if name == "prefill" else self.decode

    def arrivals_of_last(self, span_s: float) -> list[ArrivalBucket]:
        """The buckets that reach into the last `span_s` seconds, oldest first."""
        return [bucket for bucket in self.arrivals if bucket.start_s + bucket.length_s > self.now_s - span_s]

    @property
    def roles(self) -> Mapping[str, PoolName]:
        """The pool of each registered worker, by name. Workers of role `both` are left out."""
        return {
            replica.name: pool
            for pool in POOLS
            for replica in self.pool(pool).replicas
            if replica.registered and not replica.both
        }
