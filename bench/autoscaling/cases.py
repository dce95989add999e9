"""The scenarios of `bench.autoscaling`: published traces at scale, and the SLO each is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.simulation.engine_model import preset
from autoscaler.simulation.outcome import Slo
from autoscaler.simulation.simulator import Scenario
from autoscaler.simulation.traces.scaling import scaled_to_peak
from autoscaler.simulation.traces.trace import Trace, load_trace

COLD_STARTS_S = (60.0, 180.0)
MOST_REPLICAS = 64
SEED = 0


@dataclass(frozen=True, slots=True)
class ScalingCase:
    """A trace, the replicas that it is scaled to, and its SLO."""

    trace: str
    preset: str
    slo: Slo
    peak: float
    """Replicas of both pools that the busiest minute keeps fully busy."""


CASES: Sequence[ScalingCase] = (
    # MLPerf Inference's Llama-2-70B: server 2000/200 ms. Both Azure traces were published with results for that model.
    ScalingCase("azure_2023_conv.csv", "h100x4-70b", Slo(2.0, 0.2), 16),
    ScalingCase("azure_2023_code.csv", "h100x4-70b", Slo(2.0, 0.2), 16),
    # DistServe's SLO for long documents and a model of 66B: 15 s/150 ms. Prompts have 12,000 tokens on average, up to
    # 126,000.
    ScalingCase("mooncake_conversation.jsonl", "h100x8-70b", Slo(15.0, 0.15), 16),
)


def scenario_of(case: ScalingCase, folder: Path, cold_start_s: float) -> Scenario:
    """The case's trace, scaled."""
    engine = preset(case.preset)
    return Scenario(_scaled(case, folder), engine, case.slo, cold_start_s)


@lru_cache(maxsize=4)
def _scaled(case: ScalingCase, folder: Path) -> Trace:
    trace = load_trace(folder / case.trace, SEED)
    return scaled_to_peak(trace, case.peak, preset(case.preset), case.slo.tpot_s, SEED)


def default_policy(slo: Slo, cold_start_s: float) -> ScalingPolicy:
    """The default policy with these targets; apart from them it only gets the bounds and the first cold start."""
    pool: Mapping[str, Any] = {"max_replicas": MOST_REPLICAS, "cold_start_s": cold_start_s}
    return parse_policy(
        {
            "prefill": {"target_ms": slo.ttft_s * 1e3, **pool},
            "decode": {"target_ms": slo.tpot_s * 1e3, **pool},
        }
    )
