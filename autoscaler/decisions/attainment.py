"""What a policy expects of a number of replicas, and what was measured of it. Pure.

Expectations are those of the policy `slo` itself (`prefill_shares`, `decode_shares`): a queue that has become steady,
at the demand of now and its growth within a cold start. Policies without a latency target expect nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoscaler.classes.class_demand import expected_shares
from autoscaler.classes.class_plan import in_units
from autoscaler.decisions.decision import AchievedShare, ExpectedShare
from autoscaler.policies.policy_file import AnyPool, ScalingPolicy, SloPool
from autoscaler.snapshot import PoolName, ReplicaState, Snapshot


@dataclass(frozen=True, slots=True)
class AttainmentModel:
    """By the rules of one policy; without rules it expects nothing."""

    rules: ScalingPolicy | None = None

    def target_s(self, name: PoolName) -> float | None:
        """The pool's latency target, seconds."""
        pool = self._pool(name)
        return pool.target_ms / 1e3 if isinstance(pool, SloPool) else None

    def expected(self, name: PoolName, snapshot: Snapshot, counts: Sequence[int]) -> list[ExpectedShare]:
        """One entry a count of ready replicas, or of units where the pool has classes."""
        pool = self._pool(name)
        shares: Sequence[float | None] | None = None
        if pool is not None and self.rules is not None:
            shares = expected_shares(name, pool, in_units(self.rules, snapshot), counts)
        shares = [None] * len(counts) if shares is None else shares
        return [ExpectedShare(count, share) for count, share in zip(counts, shares, strict=True)]

    def _pool(self, name: PoolName) -> AnyPool | None:
        return None if self.rules is None else self.rules.pools[name]


def achieved(name: PoolName, snapshot: Snapshot, target_s: float | None, after_s: float) -> AchievedShare:
    """What the snapshot's window shows: of prompts the wait and computation, of answers the time an output token, which
    are what the targets of `slo` are set for."""
    measured = snapshot.prefill.latency if name == "prefill" else snapshot.decode.tpot
    share = measured.share_within(target_s) if measured is not None and target_s is not None else None
    return AchievedShare(
        after_s=after_s,
        ready=sum(replica.state is ReplicaState.READY for replica in snapshot.pool(name).replicas),
        samples=round(measured.total) if measured is not None else 0,
        attainment=share,
    )


def inputs_of(name: PoolName, snapshot: Snapshot) -> dict[str, float | None]:
    """The signals of one pool; rates over the snapshot's window."""
    recent = [b for b in snapshot.arrivals if b.start_s + b.length_s > snapshot.now_s - snapshot.window_s]
    length_s = sum(bucket.length_s for bucket in recent)

    def per_s(amounts: Iterable[float]) -> float | None:
        return sum(amounts) / length_s if length_s > 0 else None

    if name == "prefill":
        prefill, latency = snapshot.prefill, snapshot.prefill.latency
        return {
            "requests_per_s": per_s(b.requests for b in recent),
            "uncached_tokens_per_s": per_s(b.uncached_tokens for b in recent),
            "backlog_tokens": float(prefill.backlog_tokens),
            "replica_tokens_per_s": prefill.tokens_per_s,
            "latency_p95_s": latency.percentile(95) if latency else None,
            "cold_start_s": prefill.cold_start_s,
        }
    decode, tpot = snapshot.decode, snapshot.decode.tpot
    return {
        "output_tokens_per_s": per_s(b.output_tokens for b in recent),
        "running_requests": float(decode.running_requests),
        "waiting_reservations": float(decode.waiting_reservations),
        "context_tokens": float(decode.context_tokens),
        "replica_kv_tokens": decode.kv_capacity_tokens,
        "tpot_p95_s": tpot.percentile(95) if tpot else None,
        "cold_start_s": decode.cold_start_s,
    }
