"""Snapshots of the simulated cluster, as the autoscaler's observer makes them: windowed histograms, arrivals, rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from autoscaler.signals.arrival_log import ArrivalLog
from autoscaler.signals.cold_starts import ColdStarts
from autoscaler.signals.totals import NOTHING, READ_PHASES, CoordinatorTrack, DemandCounts, Totals
from autoscaler.simulation.cluster.cluster import Cluster
from autoscaler.simulation.cluster.replica import SimulatedReplica, SimulatedRequest
from autoscaler.simulation.scenario import Scenario
from autoscaler.snapshot import DecodeSignals, LinkSignals, PrefillSignals, Replica, Snapshot
from coordinator.admission.queue import NOTHING_HELD, Held
from splitserve.histograms import LATENCY_BOUNDS_S, DurationCounts, Histogram
from splitserve.roles import POOLS, PoolName
from splitserve.v1 import scaling_pb2

WINDOW_S = 60.0
KEPT_S = 1860.0
"""How long arrivals are kept, seconds."""
_OUTPUT_MEMORY = 200.0
"""Number of recent answers that the expected output length averages over."""
_FIRST_GUESS_TOKENS = 128.0
_ANSWER = scaling_pb2.GetSignalsResponse()


class SimulatedObserver:
    """Collects request events and makes snapshots. New replicas have full speed, so there are no cold samples."""

    def __init__(self, cluster: Cluster, scenario: Scenario) -> None:
        self._cluster, self._scenario = cluster, scenario
        self._times = {phase: DurationCounts() for phase in READ_PHASES}
        self._demand = DemandCounts()
        """Counters since the beginning, as a coordinator has them."""
        self._track, self._arrivals = CoordinatorTrack(WINDOW_S), ArrivalLog(KEPT_S)
        self._track.take(_ANSWER, NOTHING, 0.0)
        self._arrivals.look(0.0)
        self._mean_output = _FIRST_GUESS_TOKENS
        self._answers = 0.0
        self._uncached_share = 1.0
        self._in_progress = 0
        self._cold_starts = ColdStarts()

    def arrived(self, request: SimulatedRequest) -> None:
        """Counts an arrival."""
        self._in_progress += 1
        prompt_tokens = request.prompt_tokens
        self._demand += DemandCounts(
            1, prompt_tokens, prompt_tokens * self._uncached_share, self._mean_output
        )

    def local(self, request: SimulatedRequest) -> None:
        """Counts a request whose prompt is left to its decode replica."""
        tokens = request.prompt_tokens * self._uncached_share
        self._demand += DemandCounts(local_requests=1, local_tokens=tokens)

    def first_token(self, request: SimulatedRequest) -> None:
        """Counts a computed prompt. Admission waits for want of prefill capacity count in its phase, as in
        `coordinator.telemetry.request_stats`."""
        if request.first_token_s is None or request.reserved_s is None:
            return
        if request.prefill is not None:
            self._times[scaling_pb2.PHASE_PREFILL].add(
                request.first_token_s - request.reserved_s + request.held_s
            )
        self._times[scaling_pb2.PHASE_TTFT].add(request.first_token_s - request.arrival_s)
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
            self._times[scaling_pb2.PHASE_TPOT].add(tpot_s)

    def snapshot(self, now_s: float) -> Snapshot:
        """The snapshot at `now_s`. Call once per decision: each call ends a bucket of arrivals."""
        cluster, engine = self._cluster, self._scenario.engine
        decode = cluster.pool("decode")
        pools = {pool: self._seen(cluster.pool(pool)) for pool in POOLS}
        phases = {
            phase: Histogram(LATENCY_BOUNDS_S, tuple(map(float, times.counts)))
            for phase, times in self._times.items()
        }
        self._arrivals.look(now_s)
        if (arrived := self._track.take(_ANSWER, Totals(phases, self._demand), now_s)) is not None:
            since_s, demand = arrived
            self._arrivals.add(since_s, now_s, demand)
        recent = (self._track.window(now_s) or NOTHING).phases
        self._cold_starts.look(pools, 0.0)
        return Snapshot(
            now_s=now_s,
            prefill=self._prefill_signals(pools["prefill"], recent),
            decode=DecodeSignals(
                replicas=pools["decode"],
                running_requests=sum(r.running for r in decode),
                waiting_reservations=sum(r.waiting_reservations for r in decode)
                + self._held("decode").requests,
                context_tokens=int(sum(r.context_tokens for r in decode)),
                kv_capacity_tokens=engine.kv_capacity_tokens,
                max_running_requests=engine.max_running_requests,
                step=engine.decode if any(r.latency.decode for r in decode) else None,
                tpot=recent[scaling_pb2.PHASE_TPOT],
                cold_start_s=self._cold_starts.of("decode"),
            ),
            link=LinkSignals(engine.link_gb_per_s, engine.kv_bytes_per_token),
            arrivals=self._arrivals.buckets([]),
            window_s=WINDOW_S,
            wall_s=now_s,
            waiting_for_workers=cluster.waiting_for_workers,
            in_progress=self._in_progress,
        )

    def _prefill_signals(self, there: tuple[Replica, ...], recent: Mapping[int, Histogram]) -> PrefillSignals:
        replicas, held = self._cluster.pool("prefill"), self._held("prefill")
        rates = [rate for r in replicas if (rate := r.latency.prefill_tokens_per_s)]
        return PrefillSignals(
            replicas=there,
            waiting_requests=sum(r.prompts.waiting for r in replicas) + held.requests,
            backlog_tokens=sum(r.prompts.tokens for r in replicas) + round(held.uncached_tokens),
            tokens_per_s=fmean(rates) if rates else None,
            latency=recent[scaling_pb2.PHASE_PREFILL],
            ttft=recent[scaling_pb2.PHASE_TTFT],
            cold_start_s=self._cold_starts.of("prefill"),
        )

    def _seen(self, replicas: Sequence[SimulatedReplica]) -> tuple[Replica, ...]:
        return tuple(
            Replica(
                r.name,
                r.state,
                r.since_s,
                float(r.load),
                ours=r.role != "both",
                both=r.role == "both",
                can_change_role=self._scenario.changes_role and r.role != "both",
                created_wall_s=r.ordered_s,
            )
            for r in replicas
        )

    def _held(self, cause: PoolName) -> Held:
        """What admission holds back for want of this pool's capacity."""
        held = self._cluster.held
        return held if held.cause == cause else NOTHING_HELD
