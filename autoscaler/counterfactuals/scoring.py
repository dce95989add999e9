"""Scores the policy in force and its shadows on each window of recorded traffic, one process after the other."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from autoscaler.classes.class_plan import in_units
from autoscaler.counterfactuals.recorded_window import RecordedWindow, recorded_window
from autoscaler.counterfactuals.replay import ReplayScore, replay_apart
from autoscaler.decisions.decision import ScalingDecision
from autoscaler.decisions.journal import DecisionJournal
from autoscaler.sharing.claims.shares import Uses
from autoscaler.simulation.outcome import Slo
from autoscaler.snapshot import POOLS, PoolName, Snapshot
from splitserve.errors import SplitserveError
from splitserve.logs import log_event

Role = Literal["in_force", "shadow"]
Replay = Callable[[RecordedWindow, Path], Awaitable[ReplayScore]]
DEFAULT_COLD_START_S = 60.0


@dataclass(frozen=True, slots=True)
class ScoredPolicy:
    """A policy file that is replayed."""

    role: Role
    path: Path

    @property
    def labels(self) -> tuple[str, str]:
        """Its name and role."""
        return self.path.stem, self.role


@dataclass(slots=True)
class ShadowScoring:
    """Runs beside the control loop and shares only its journal with it. `scores` are of the last window."""

    journal: DecisionJournal
    policies: Sequence[ScoredPolicy]
    length_s: float
    replay: Replay = replay_apart
    limits: Callable[[], Uses] = dict
    """What the model may have now, where it shares an inventory with others."""
    scores: Mapping[ScoredPolicy, ReplayScore] = field(default_factory=dict)
    failures: Counter[ScoredPolicy] = field(default_factory=Counter)

    async def run(self) -> None:
        """Scores once a window, until cancelled."""
        await score_in_turn([self], self.length_s)

    async def score(self) -> None:
        """Replays the last window with all policies. Errors are counted and logged, not raised."""
        try:
            window = self._window()
        except SplitserveError as error:
            log_event("shadow.not_scored", level=logging.DEBUG, error=error.message)
            return
        if window is None:
            return
        scores: dict[ScoredPolicy, ReplayScore] = {}
        for one in self.policies:
            name, role = one.labels
            try:
                scores[one] = found = await self.replay(window, one.path)
            except SplitserveError as error:
                self.failures[one] += 1
                told = {"policy": name, "role": role, "error": error.message}
                log_event("shadow.not_scored", level=logging.WARNING, **told)
            else:
                log_event("shadow.scored", policy=name, role=role, length_s=window.length_s, **asdict(found))
        self.scores = scores

    def document(self) -> list[dict[str, Any]]:
        """The last scores, for `splitserve autoscaler explain`."""
        return [
            {"policy": one.labels[0], "role": one.role, "length_s": self.length_s, **asdict(score)}
            for one, score in self.scores.items()
        ]

    def _window(self) -> RecordedWindow | None:
        snapshot, decisions = self.journal.snapshot, self.journal.decisions
        if snapshot is None or not decisions or not self.policies:
            return None
        initial = _ready_at(decisions, snapshot.now_s - self.length_s)
        if self.journal.attainment.rules is not None:
            snapshot = in_units(self.journal.attainment.rules, snapshot)
        found = recorded_window(snapshot, self.length_s, self._slo(), initial, _cold_start_s(snapshot))
        return replace(found, limits=dict(self.limits()))

    def _slo(self) -> Slo:
        """The targets of the policy in force, for all; the simulator's where it has none."""
        targets = {pool: self.journal.attainment.target_s(pool) for pool in POOLS}
        return Slo(targets["prefill"] or Slo().ttft_s, targets["decode"] or Slo().tpot_s)


async def score_in_turn(scorings: Sequence[ShadowScoring], length_s: float) -> None:
    """Scores once a window, one model after the other, until cancelled."""
    while True:
        await asyncio.sleep(length_s)
        for one in scorings:
            await one.score()


def _ready_at(decisions: Sequence[ScalingDecision], at_s: float) -> dict[PoolName, int]:
    """Replicas in rotation at the first decision from then on; with classes the units that were there."""
    first = next((one for one in decisions if one.at_s >= at_s), decisions[-1])
    found: dict[PoolName, int] = {}
    for name in POOLS:
        pool = first.pools[name]
        there = pool.bill.classes if pool.bill is not None else ()
        found[name] = round(sum(one.there * one.speed for one in there)) or pool.ready
    return found


def _cold_start_s(snapshot: Snapshot) -> float:
    """The longer of both pools' measured ones."""
    measured = [snapshot.prefill.cold_start_s, snapshot.decode.cold_start_s]
    return max((one for one in measured if one is not None), default=DEFAULT_COLD_START_S)
