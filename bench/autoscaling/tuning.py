"""Baselines at their best: the grid of each one's knobs, and what was chosen on the tuning cases.

The default policy is not tuned here. Its own defaults were once chosen on azure_2023_code, azure_2023_conv and
mooncake_conversation; `mooncake-unseen` is new to it, as to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from bench.autoscaling.cases import CASES
from bench.autoscaling.opponents.baselines import BASELINES, STATIC, STATIC_BEST, Knobs
from bench.autoscaling.replays import ATTAINMENT, Replay, ReplayRow


def _grid(**values: Sequence[Any]) -> list[Knobs]:
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


GRIDS: Mapping[str, Sequence[Knobs]] = {
    "hpa-p95-latency": _grid(share=(0.25, 0.5, 1.0)),
    "hpa-utilization": _grid(target=(0.4, 0.55, 0.7, 0.85), down_s=(60, 300)),
    "keda-rate": _grid(use=(0.4, 0.55, 0.7, 0.85), window_s=(30.0, 120.0), down_s=(60, 300)),
    "token-backlog": _grid(tail=(0.1, 0.3, 0.65), kv=(0.4, 0.6, 0.8)),
    "llm-d-slo": _grid(share=(0.25, 0.4, 0.6, 1.0), window_s=(30.0, 60.0), down_s=(60, 300)),
    "dynamo-thresholds": _grid(target=("throughput", "latency")),
    "dynamo-sla": [
        *_grid(interval_s=(60.0, 180.0), predictor=("constant", "kalman"), load_scaling=(False, True)),
        *_grid(
            interval_s=(60.0, 180.0),
            predictor=("constant", "kalman"),
            load_scaling=(True,),
            use=(0.3, 0.4, 0.55, 0.7),
        ),
    ],
}
TUNED: Mapping[str, Knobs] = {
    "hpa-p95-latency": {"share": 0.5},
    "hpa-utilization": {"target": 0.7, "down_s": 300},
    "keda-rate": {"use": 0.85, "window_s": 30.0, "down_s": 300},
    "token-backlog": {"tail": 0.3, "kv": 0.4},
    "llm-d-slo": {"share": 0.4, "window_s": 30.0, "down_s": 60},
    "dynamo-thresholds": {"target": "latency"},
    "dynamo-sla": {"interval_s": 60.0, "predictor": "constant", "load_scaling": True, "use": 0.3},
}
"""What was best on `code-70b` with cold starts of 60 s, 2026-11-25. No point of the grids of Dynamo's modes attains
the bar there, so these attain most."""
OPPONENTS = (*(name for name in BASELINES if name not in STATIC), STATIC_BEST)
"""Whom the policy is judged against."""


def tuning_replays() -> list[Replay]:
    """Every point of every grid on every tuning case."""
    return [
        Replay(case, kind, name, knobs)
        for case in CASES
        if not case.judged
        for kind in case.starts
        for name, grid in GRIDS.items()
        for knobs in grid
    ]


def best_of(rows: Sequence[ReplayRow]) -> dict[str, ReplayRow]:
    """By baseline: the cheapest that attains the bar; where none does, the one that attains most."""
    best: dict[str, ReplayRow] = {}
    for row in rows:
        if row.name not in best or _rank(row) > _rank(best[row.name]):
            best[row.name] = row
    return best


def _rank(row: ReplayRow) -> tuple[bool, float]:
    attains = row.attainment >= ATTAINMENT
    return attains, -row.replica_hours if attains else row.attainment
