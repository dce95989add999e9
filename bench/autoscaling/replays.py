"""Replays as jobs for processes: one policy, baseline or bound on one case, and the figures that are kept of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.simulator import POLICY_NAME, run_policy
from bench.autoscaling.cases import ScalingCase, default_policy, scenario_of
from bench.autoscaling.opponents.baselines import Knobs
from bench.autoscaling.opponents.clairvoyant import clairvoyant_bound
from bench.autoscaling.opponents.runs import run_baseline
from splitserve.config.coordinator import AdmissionConfig

ATTAINMENT = 0.97
BOUND = "clairvoyant"


@dataclass(frozen=True, slots=True)
class Replay:
    """One job. `name`: `policy`, a baseline or `clairvoyant`."""

    case: ScalingCase
    starts: str
    name: str
    knobs: Knobs = field(default_factory=dict)
    queued: bool = False
    """Whether requests pass the coordinator's admission, with its default settings."""


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """What is kept of a run."""

    case: str
    starts: str
    name: str
    knobs: Mapping[str, Any]
    requests: int
    attainment: float
    attainment_ttft: float
    attainment_tpot: float
    replica_hours: float
    actions: int
    failed: int
    peak_replicas: int
    took_s: float

    def beats(self, other: ReplayRow) -> bool:
        """Whether it has higher attainment in fewer replica-hours."""
        return self.attainment > other.attainment and self.replica_hours < other.replica_hours


def replayed(replay: Replay, folder: Path) -> ReplayRow:
    """Runs the job here."""
    began = time.process_time()
    scenario = scenario_of(replay.case, folder, replay.starts)
    if replay.queued:
        scenario = replace(scenario, admission=AdmissionConfig())
    policy = default_policy(replay.case.slo, scenario.starts.median_s)
    if replay.name == POLICY_NAME:
        outcome = run_policy(scenario, policy)
    elif replay.name == BOUND:
        outcome = clairvoyant_bound(scenario, ATTAINMENT).outcome
    else:
        outcome = run_baseline(scenario, replay.name, policy.pools, replay.knobs, ATTAINMENT)
    return _row(replay, outcome, time.process_time() - began)


def _row(replay: Replay, outcome: Outcome, took_s: float) -> ReplayRow:
    return ReplayRow(
        replay.case.name,
        replay.starts,
        replay.name,
        dict(replay.knobs),
        len(outcome.requests),
        outcome.attainment,
        outcome.attainment_ttft,
        outcome.attainment_tpot,
        outcome.total_replica_hours,
        sum(outcome.actions.values()),
        outcome.failed_requests,
        outcome.peak_replicas,
        took_s,
    )


def all_replayed(replays: Sequence[Replay], folder: Path, processes: int) -> list[ReplayRow]:
    """Runs the jobs in so many processes; rows in the order of the jobs. Progress goes to standard error."""
    if processes <= 1:
        return [_told(replayed(replay, folder)) for replay in replays]
    rows: dict[int, ReplayRow] = {}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        jobs = {pool.submit(replayed, replay, folder): index for index, replay in enumerate(replays)}
        for job in as_completed(jobs):
            rows[jobs[job]] = _told(job.result())
    return [rows[index] for index in range(len(replays))]


def _told(row: ReplayRow) -> ReplayRow:
    knobs = f" {dict(row.knobs)}" if row.knobs else ""
    figures = f"{row.attainment:.1%}, {row.replica_hours:.2f} h, {row.took_s:.0f} s CPU"
    print(f"{row.case}, {row.starts}, {row.name}{knobs}: {figures}", file=sys.stderr, flush=True)
    return row
