"""Published scaling rules as deciders: the baselines that the default policy is compared with.

Each follows the formula and defaults of its source, with knobs by which `bench.autoscaling` tunes it. What a rule would
be told by an operator, or learn from a profile, it is told exactly (`RuleInputs`): engine timing, the mean request.
Only the static ones know the future: their counts come from the trace itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoscaler.plan import Decide
from autoscaler.policies.policy_file import PoolPolicy
from autoscaler.simulation.cluster.prefix_cache import PrefixCache
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.scenario import Slo
from autoscaler.simulation.traces.scaling import pool_work_s
from autoscaler.simulation.traces.trace import TraceRequest
from bench.autoscaling.opponents.dynamo_baselines import (
    DYNAMO_INTERVAL_S,
    SlaKnobs,
    dynamo_sla,
    dynamo_thresholds,
)
from bench.autoscaling.opponents.hpa_baselines import (
    HPA_SYNC_S,
    hpa_p95_latency,
    hpa_utilization,
    keda_rate,
    llm_d_slo,
    token_backlog,
)
from splitserve.roles import POOLS, PoolName

Knobs = Mapping[str, Any]
"""Keyword arguments of a baseline; what is not given is as its source ships or documents it."""

STATIC_PEAK, STATIC_BEST = "static-peak", "static-best"
STATIC = (STATIC_PEAK, STATIC_BEST)
"""They need runs or the trace, not a rule; see `runs.py`."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A rule and its decision interval."""

    name: str
    decide: Decide
    interval_s: float


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """What a rule is told before the run."""

    slo: Slo
    engine: EngineModel
    bounds: Mapping[PoolName, PoolPolicy]
    work_s: Mapping[PoolName, float]
    """Seconds of a fully used replica that a mean request takes of each pool."""


def mean_work_s(
    requests: Sequence[TraceRequest], engine: EngineModel, tpot_s: float
) -> dict[PoolName, float]:
    """`RuleInputs.work_s` of a trace, as a benchmark with the real traffic would find it.

    Prompts cost what the prefix cache of one replica leaves of them.
    """
    prefill_s, decode_s = pool_work_s(requests, engine, tpot_s)
    prompts = sum(request.prompt_tokens for request in requests)
    cache, cached = PrefixCache(engine.kv_capacity_tokens), 0
    for request in requests:
        if request.block_ids:
            cached += cache.cached_tokens(request.block_ids, request.prompt_tokens)
            cache.keep(request.block_ids)
    count, left = max(1, len(requests)), 1 - cached / max(1, prompts)
    return {"prefill": prefill_s * left / count, "decode": decode_s / count}


def _hpa_p95_latency(known: RuleInputs, **knobs: Any) -> Decide:
    return hpa_p95_latency(known.slo, known.bounds, **knobs)


def _hpa_utilization(known: RuleInputs, **knobs: Any) -> Decide:
    return hpa_utilization(known.bounds, **knobs)


def _keda_rate(known: RuleInputs, **knobs: Any) -> Decide:
    return keda_rate(known.work_s, known.bounds, **knobs)


def _token_backlog(known: RuleInputs, **knobs: Any) -> Decide:
    return token_backlog(known.slo, known.engine, known.bounds, **knobs)


def _llm_d_slo(known: RuleInputs, **knobs: Any) -> Decide:
    return llm_d_slo(known.slo, known.engine, known.bounds, **knobs)


def _dynamo_thresholds(known: RuleInputs, **knobs: Any) -> Decide:
    return dynamo_thresholds(known.engine, known.bounds, **knobs)


def _dynamo_sla(known: RuleInputs, **knobs: Any) -> Decide:
    return dynamo_sla(known.slo, known.engine, known.bounds, SlaKnobs(**knobs))


_RULES: Mapping[str, tuple[Callable[..., Decide], float]] = {
    "hpa-p95-latency": (_hpa_p95_latency, HPA_SYNC_S),
    "hpa-utilization": (_hpa_utilization, HPA_SYNC_S),
    "keda-rate": (_keda_rate, HPA_SYNC_S),
    "token-backlog": (_token_backlog, HPA_SYNC_S),
    "llm-d-slo": (_llm_d_slo, HPA_SYNC_S),
    "dynamo-thresholds": (_dynamo_thresholds, DYNAMO_INTERVAL_S),
    "dynamo-sla": (_dynamo_sla, DYNAMO_INTERVAL_S),
}
BASELINES = (STATIC_PEAK, *_RULES)
"""Of one run each. Beside them `STATIC_BEST` is a search."""


def baseline(name: str, known: RuleInputs, knobs: Knobs | None = None) -> Baseline:
    """The rule of this name, not a static one."""
    rule, interval_s = _RULES[name]
    return Baseline(name, rule(known, **(knobs or {})), interval_s)


def peak_within(peak: Mapping[PoolName, int], bounds: Mapping[PoolName, PoolPolicy]) -> dict[PoolName, int]:
    """Constant counts within the bounds."""
    return {pool: min(peak[pool], bounds[pool].max_replicas) for pool in POOLS}
