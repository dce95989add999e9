"""Sees which neutral workers the coordinators' planners have moved since the last plan. No I/O.

An observed leaning that is another than before, and that no plan of this autoscaler has asked for, is taken for a
planner's. It counts for as long as the autoscaler's window looks back to the time before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autoscaler.reconcile import Action, Lean
from autoscaler.snapshot import POOLS, LeaningTurn, PoolName, Snapshot
from splitserve.logs import log_event

LEAST_S = 30.0
"""A move counts for no less: planners move nobody back before."""


class TurnWatch:
    """Written by one control loop. Losing it, by a restart, costs one decision that does not know of a move."""

    def __init__(self) -> None:
        self._leaned: Mapping[str, PoolName] = {}
        self._told: Mapping[str, PoolName] = {}
        self._turns: tuple[LeaningTurn, ...] = ()

    def look(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the moves of late, oldest first."""
        since_s = snapshot.now_s - max(LEAST_S, snapshot.window_s)
        kept = [turn for turn in self._turns if turn.at_s > since_s]
        for pool in POOLS:
            for one in snapshot.pool(pool).replicas:
                before = self._leaned.get(one.name, pool) if one.neutral and one.registered else pool
                if before != pool and self._told.get(one.name) != pool:
                    kept.append(LeaningTurn(one.name, pool, snapshot.now_s, one.replica_class))
                    log_event("leaning.turned", worker_id=one.name, pool=pool)
        leanings = snapshot.leanings
        self._leaned = leanings if snapshot.complete else {**self._leaned, **leanings}
        self._turns = tuple(kept)
        return replace(snapshot, turns=self._turns)

    def told(self, actions: Iterable[Action]) -> None:
        """These are carried out now. Who is told by a plan where to lean is no planner's any more."""
        self._told = {action.name: action.pool for action in actions if isinstance(action, Lean)}
        self._turns = tuple(turn for turn in self._turns if turn.name not in self._told)
