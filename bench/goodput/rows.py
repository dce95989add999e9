"""From finished runs to what is told: a row for each system under each load, differences and goodput. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from autoscaler.simulation.scenario import Slo
from bench.goodput.outcome import attained_share, figures
from bench.goodput.statistics import Estimate, difference, goodput, mean_over_seeds
from bench.goodput.systems import FIXED_OWN
from bench.goodput.turns import FinishedTurn

LATE_SHARE = 0.05
"""A run is marked where the generator sent more than 1% of the requests later than this share of the TTFT target."""
BUSY_SHARE = 0.1
"""A row is marked where other processes used more than this share of the cores, in the mean over its runs."""
OWN = "default"


@dataclass(frozen=True)
class Cell:
    """One system under one load: its runs by seed."""

    mix: str
    rate: float
    system: str
    runs: Mapping[int, FinishedTurn]

    def shares(self, slo: Slo) -> dict[int, float]:
        """The attained share of all that was sent, by seed."""
        return {
            seed: share
            for seed, run in self.runs.items()
            if (share := attained_share(run.requests, slo)) is not None
        }


def cells_of(turns: Sequence[FinishedTurn]) -> list[Cell]:
    """The runs by mix, rate and system, in order of first appearance."""
    runs_by_system: dict[tuple[str, float, str], dict[int, FinishedTurn]] = defaultdict(dict)
    for turn in turns:
        runs_by_system[turn.key.mix, turn.key.rate, turn.key.system][turn.key.seed] = turn
    return [
        Cell(*where, runs) for where, runs in sorted(runs_by_system.items(), key=lambda item: item[0][:2])
    ]


def row_of(cell: Cell, slo: Slo) -> dict[str, Any]:
    """All figures of a cell; `outcome.figures` are over the requests of all seeds together."""
    runs = list(cell.runs.values())
    shares = cell.shares(slo)
    attained = mean_over_seeds(list(shares.values()))
    lateness_s = max(run.lateness_p99_s for run in runs)
    other_load = fmean(run.other_load for run in runs)
    return {
        "mix": cell.mix,
        "system": cell.system,
        "rate": cell.rate,
        "attained": round(attained.value, 4),
        **_bounds(attained),
        "seeds": len(shares),
        "attained_by_seed": {seed: round(share, 4) for seed, share in sorted(shares.items())},
        **figures([request for run in runs for request in run.requests], slo),
        "generator_lateness_p99_s": lateness_s,
        "generator_cores": round(fmean(run.generator_cores for run in runs), 3),
        "late_generator": lateness_s > LATE_SHARE * slo.ttft_s,
        "other_load": round(other_load, 3),
        "busy_machine": other_load > BUSY_SHARE,
        "core_speed_mb_per_s": round(median(speed for run in runs for speed in run.core_speed), 1),
    }


def differences(cells: Sequence[Cell], slo: Slo) -> list[dict[str, Any]]:
    """For each load the default less every other system, and less the best of its own fixed ones (`best fixed`), over
    the seeds that all of them have."""
    loads: dict[tuple[str, float], dict[str, Cell]] = defaultdict(dict)
    for cell in cells:
        loads[cell.mix, cell.rate][cell.system] = cell
    rows = []
    for (mix, rate), by_system in loads.items():
        if OWN not in by_system:
            continue
        fixed = [name for name in FIXED_OWN if name in by_system]
        against = {name: [name] for name in by_system if name != OWN}
        if len(fixed) > 1:
            against["best fixed"] = fixed
        for label, names in against.items():
            shares = [by_system[name].shares(slo) for name in (OWN, *names)]
            seeds = sorted(set.intersection(*(set(by_seed) for by_seed in shares)))
            if not seeds:
                continue
            own, *others = [[by_seed[seed] for seed in seeds] for by_seed in shares]
            estimate = difference(own, others)
            rows.append(
                {"mix": mix, "rate": rate, "against": label, "seeds": len(seeds)}
                | {"difference": round(estimate.value, 4), **_bounds(estimate)}
            )
    return rows


def goodput_of(cells: Sequence[Cell], slo: Slo) -> dict[str, dict[str, dict[str, Any]]]:
    """The highest rate with 90% attained, by mix and system, as the fields of a GoodputRate."""
    points: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for cell in cells:
        points[cell.mix][cell.system][cell.rate] = fmean(cell.shares(slo).values())
    return {
        mix: {system: _goodput_fields(attained) for system, attained in by_system.items()}
        for mix, by_system in points.items()
    }


def _goodput_fields(attained: Mapping[float, float]) -> dict[str, Any]:
    estimate = goodput(attained)
    return asdict(estimate) | {"rate": round(estimate.rate, 3)}


def _bounds(estimate: Estimate) -> dict[str, float | None]:
    return {
        "low": None if estimate.low is None else round(estimate.low, 4),
        "high": None if estimate.high is None else round(estimate.high, 4),
    }
