"""Snapshots of the simulated cluster, as the autoscaler's observer makes them: windowed histograms, arrivals, rates."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.signals.cold_starts import ColdStarts
from autoscaler.signals.serving_classes import serving_by_class
from autoscaler.simulation.cluster.cluster import Cluster
from autoscaler.simulation.cluster.neutral_replica import NeutralReplica
from autoscaler.simulation.cluster.replica import PrefillReplica, SimulatedReplica, SimulatedRequest
from autoscaler.sizing.engine_model import EngineModel
from autoscaler.snapshot import (
    POOLS,
    ArrivalBucket,
    ClassSignals,
    DecodeSignals,
    LinkSignals,
    PoolName,
    PrefillSignals,
    Replica,
    ReplicaState,
    Snapshot,
    StepTimeModel,
)
from coordinator.admission.entry import NOTHING_HELD, Held
from splitserve.histograms import LATENCY_BOUNDS_S, Histogram

Member = TypeVar("Member", bound=SimulatedReplica)
BUCKET_S = 5.0
KEPT_S = 1860.0
"""How long arrivals are kept, seconds."""
_OUTPUT_MEMORY = 200.0
"""Number of recent answers that the expected output length averages over."""
_FIRST_GUESS_TOKENS = 128.0


class _Window:
    """Durations of the last `window_s`, counted in slices between two decisions."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._slices: deque[tuple[float, list[int]]] = deque()
        self._counts = [0] * (len(LATENCY_BOUNDS_S) + 1)

    def add(self, value_s: float) -> None:
        self._counts[bisect_left(LATENCY_BOUNDS_S, value_s)] += 1

    def read(self, now_s: float) -> Histogram:
        self._slices.append((now_s, self._counts))
        self._counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        while self._slices[0][0] <= now_s - self._window_s + 1e-9:
            self._slices.popleft()
        sums = tuple(
            float(sum(column)) for column in zip(*(counts for _, counts in self._slices), strict=True)
        )
        return Histogram(LATENCY_BOUNDS_S, sums)


class _Rate:
    """Tokens per busy second over the window; the last measurement while nothing is computed."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, float, float]] = deque()
        self.tokens_per_s: float | None = None

    def look(self, now_s: float, replicas: Iterable[PrefillReplica]) -> None:
        tokens = busy_s = 0.0
        for one in replicas:
            tokens, busy_s = tokens + one.computed_tokens, busy_s + one.busy_s
        self._seen.append((now_s, tokens, busy_s))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()
        _, tokens_before, busy_before_s = self._seen[0]
        if busy_s > busy_before_s:
            self.tokens_per_s = (tokens - tokens_before) / (busy_s - busy_before_s)


class SimulatedObserver:
    """Collects request events and makes snapshots. There are no cold samples: new replicas have full speed."""

    def __init__(self, cluster: Cluster, engine: EngineModel, window_s: float) -> None:
        self._cluster = cluster
        self._engine = engine
        self._window_s = window_s
        self._prefill, self._ttft = _Window(window_s), _Window(window_s)
        self._tpot, self._reserve, self._transfer = _Window(window_s), _Window(window_s), _Window(window_s)
        self._buckets: deque[list[float]] = deque()
        self._first_bucket = 0
        self._mean_output = _FIRST_GUESS_TOKENS
        self._answers = 0.0
        self._uncached_share = 1.0
        self._rate, self._class_rates = _Rate(window_s), dict[str, _Rate]()
        self._decoded = False
        self._in_progress = 0
        self._cold_starts = ColdStarts()

    def arrived(self, request: SimulatedRequest, now_s: float) -> None:
        """Counts an arrival."""
        self._in_progress += 1
        index = int(now_s // BUCKET_S) - self._first_bucket
        while index >= len(self._buckets):
            self._buckets.append([0, 0, 0.0, 0.0])
        bucket = self._buckets[index]
        bucket[0] += 1
        bucket[1] += request.prompt_tokens
        bucket[2] += request.prompt_tokens * self._uncached_share
        bucket[3] += self._mean_output

    def first_token(self, request: SimulatedRequest) -> None:
        """Counts a computed prompt. Admission waits count in the phase of the pool that lacked capacity, as in
        `coordinator.metrics.recorder`."""
        if request.first_token_s is None or request.reserved_s is None:
            return
        held_prefill_s, held_decode_s = request.held_s
        self._prefill.add(request.first_token_s - request.reserved_s + held_prefill_s)
        self._ttft.add(request.first_token_s - request.arrival_s)
        self._reserve.add(request.reserved_s - request.admitted_s + held_decode_s)
        share = 1 - request.cached / request.prompt_tokens
        # Weighted by length: the share of tokens, not of prompts.
        weight = min(1.0, request.prompt_tokens / (_OUTPUT_MEMORY * 1000))
        self._uncached_share += (share - self._uncached_share) * weight

    def ended(self, request: SimulatedRequest) -> None:
        """Counts a request that ended."""
        self._in_progress -= 1
        if request.failed:
            return
        self._answers = min(_OUTPUT_MEMORY, self._answers + 1)
        self._mean_output += (request.output_tokens - self._mean_output) / self._answers
        if (tpot_s := request.tpot_s) is not None:
            self._decoded = True
            self._tpot.add(tpot_s)
        if request.joined_s is not None and request.first_token_s is not None:
            self._transfer.add(request.joined_s - request.first_token_s)

    def snapshot(self, now_s: float) -> Snapshot:
        """The snapshot at `now_s`. Call once per decision: each call ends a slice of the windows."""
        cluster, engine = self._cluster, self._engine
        decode = cluster.serving_decode
        there = [replica for pool in POOLS for replica in cluster.pool(pool)]
        self._cold_starts.look(self.actual(), {r.name: (r.state, r.since_s) for r in there})
        link = LinkSignals(engine.link_gb_per_s, engine.kv_bytes_per_token, self._transfer.read(now_s))
        return Snapshot(
            now_s=now_s,
            prefill=self._prefill_signals(now_s),
            decode=DecodeSignals(
                replicas=_seen(cluster.decode),
                running_requests=sum(r.running for r in decode),
                waiting_reservations=sum(r.waiting_reservations for r in decode)
                + self._held("decode").requests,
                context_tokens=int(sum(r.context_tokens for r in decode)),
                kv_capacity_tokens=engine.kv_capacity_tokens,
                max_running_requests=engine.max_running_requests,
                step=StepTimeModel(engine.step_s, engine.sequence_s, engine.context_token_s)
                if self._decoded
                else None,
                tpot=self._tpot.read(now_s),
                reserve_wait=self._reserve.read(now_s),
                cold_start_s=self._cold_starts.of("decode"),
                wake_s=cluster.wake_s("decode"),
                classes=self._decode_classes(),
            ),
            link=link,
            arrivals=self._arrivals(now_s),
            window_s=self._window_s,
            wall_s=now_s,
            waiting_for_workers=cluster.waiting_for_workers,
            in_progress=self._in_progress,
        )

    def actual(self) -> list[ActualReplica]:
        """The replicas that exist, as an actuator lists them."""
        return [
            ActualReplica(
                one.name,
                pool,
                one.state is ReplicaState.DRAINING,
                one.ordered_s,
                replica_class=one.replica_class,
            )
            for pool in POOLS
            for one in self._cluster.pool(pool)
        ]

    def _prefill_signals(self, now_s: float) -> PrefillSignals:
        replicas, held = self._cluster.computing, self._held("prefill")
        classes = self._measure_rates(now_s)
        return PrefillSignals(
            replicas=_seen(self._cluster.prefill),
            waiting_requests=sum(r.waiting for r in replicas) + held.requests,
            backlog_tokens=sum(r.backlog_tokens for r in replicas) + round(held.uncached_tokens),
            tokens_per_s=self._rate.tokens_per_s,
            latency=self._prefill.read(now_s),
            ttft=self._ttft.read(now_s),
            cold_start_s=self._cold_starts.of("prefill"),
            wake_s=self._cluster.wake_s("prefill"),
            classes=classes,
        )

    def _held(self, cause: PoolName) -> Held:
        """What admission holds back for want of this pool's capacity."""
        held = self._cluster.held
        return held if held.cause == cause else NOTHING_HELD

    def _measure_rates(self, now_s: float) -> dict[str, ClassSignals]:
        """Measures all together, and each class; neutral replicas as the autoscaler does, by what they report."""
        if any(isinstance(one, NeutralReplica) for one in self._cluster.serving_prefill):
            self._rate.tokens_per_s = _reported_rate(self._cluster.serving_prefill)
            there = _by_class(self._cluster.serving_prefill)
            return {kind: ClassSignals(len(some), _reported_rate(some)) for kind, some in there.items()}
        ended = [one for one in self._cluster.ended if isinstance(one, PrefillReplica)]
        everything = [*self._cluster.computing, *ended]
        self._rate.look(now_s, everything)
        found = {}
        for kind in sorted({one.replica_class for one in everything}):
            rate = self._class_rates.setdefault(kind, _Rate(self._window_s))
            rate.look(now_s, [one for one in everything if one.replica_class == kind])
        for kind, serving in _by_class(self._cluster.serving_prefill).items():
            found[kind] = ClassSignals(len(serving), self._class_rates[kind].tokens_per_s)
        return found

    def _decode_classes(self) -> dict[str, ClassSignals]:
        found = {}
        for kind, serving in _by_class(self._cluster.serving_decode).items():
            engine = self._engine.at_speed("decode", serving[0].speed)
            step = StepTimeModel(engine.step_s, engine.sequence_s, engine.context_token_s)
            found[kind] = ClassSignals(
                len(serving),
                None,
                engine.kv_capacity_tokens,
                engine.max_running_requests,
                step if self._decoded else None,
            )
        return found

    def _arrivals(self, now_s: float) -> tuple[ArrivalBucket, ...]:
        last = int(now_s // BUCKET_S)
        while self._first_bucket + len(self._buckets) <= last:
            self._buckets.append([0, 0, 0.0, 0.0])
        while (self._first_bucket + 1) * BUCKET_S <= now_s - KEPT_S:
            self._buckets.popleft()
            self._first_bucket += 1
        return tuple(
            ArrivalBucket(
                (self._first_bucket + i) * BUCKET_S, BUCKET_S, int(n), int(prompt), int(uncached), out
            )
            for i, (n, prompt, uncached, out) in enumerate(self._buckets)
            if (self._first_bucket + i) * BUCKET_S < now_s
        )


def _seen(replicas: Sequence[SimulatedReplica]) -> tuple[Replica, ...]:
    return tuple(
        Replica(
            r.name,
            r.state,
            r.since_s,
            float(r.load),
            neutral=isinstance(r, NeutralReplica),
            replica_class=r.replica_class,
        )
        for r in replicas
    )


def _reported_rate(replicas: Iterable[PrefillReplica]) -> float | None:
    """The mean of the measured ones."""
    rates = [one.prefill_tokens_per_s for one in replicas if one.prefill_tokens_per_s > 0]
    return fmean(rates) if rates else None


def _by_class(replicas: Sequence[Member]) -> Mapping[str, Sequence[Member]]:
    return serving_by_class((one.replica_class, one.state, one) for one in replicas)
