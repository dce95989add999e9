"""Sees which neutral workers the coordinators' planners have moved since the last plan. No I/O.

An observed leaning that is another than before, and that no plan of this autoscaler has asked for, is taken for a
planner's. It counts for as long as the autoscaler's window looks back to the time before it. While another autoscaler
acts, or may, its plans move workers, too: none of these moves is known to be a planner's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autoscaler.reconcile import Action, Lean
from autoscaler.snapshot import POOLS, LeaningTurn, PoolName, Snapshot
from splitserve.logs import log_event

LEAST_S = 30.0
"""A move counts for no less: planners move nobody back before."""
TOLD_S = 30.0
"""How long a worker may take to follow a plan that no later one has replaced as a whole."""


class TurnWatch:
    """Written by one control loop. Losing it, by a restart, costs one decision that does not know of a move."""

    def __init__(self) -> None:
        self._leaned: Mapping[str, PoolName] = {}
        self._told: Mapping[str, tuple[PoolName, float]] = {}
        """Where plans have told workers to lean that have not followed yet, and when."""
        self._turns: tuple[LeaningTurn, ...] = ()

    def look(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the moves of late, oldest first."""
        if not snapshot.acting:
            self._leaned, self._told, self._turns = {}, {}, ()
            return replace(snapshot, turns=())
        since_s = snapshot.now_s - max(LEAST_S, snapshot.window_s)
        kept = [turn for turn in self._turns if turn.at_s > since_s]
        for pool in POOLS:
            for one in snapshot.pool(pool).replicas:
                before = self._leaned.get(one.name, pool) if one.neutral and one.registered else pool
                told, _ = self._told.get(one.name, (None, 0.0))
                if before != pool and told != pool:
                    kept.append(LeaningTurn(one.name, pool, snapshot.now_s, one.replica_class))
                    log_event("leaning.turned", worker_id=one.name, pool=pool)
        leanings = snapshot.leanings
        self._leaned = leanings if snapshot.complete else {**self._leaned, **leanings}
        # However long ago the last look was: what has been told since is asked of this one.
        self._told = {
            name: (pool, at_s)
            for name, (pool, at_s) in self._told.items()
            if leanings.get(name) != pool and snapshot.now_s - at_s < TOLD_S
        }
        self._turns = tuple(kept)
        return replace(snapshot, turns=self._turns)

    def told(self, actions: Iterable[Action], now_s: float, *, whole: bool = True) -> None:
        """These are carried out now. Who is told by a plan where to lean is no planner's any more. `whole`: they are
        all that the plan wants, so that what was told before and is not among them holds no more."""
        orders = {action.name: (action.pool, now_s) for action in actions if isinstance(action, Lean)}
        self._told = orders if whole else {**self._told, **orders}
        self._turns = tuple(turn for turn in self._turns if turn.name not in self._told)
