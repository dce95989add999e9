"""Which classes could not be started a moment ago, for want of GPUs, places or a pattern: others are started
meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autoscaler.reconcile import Action, Start
from autoscaler.snapshot import PoolClass, PoolName
from autoscaler.start_watch import short_for_s
from splitserve.errors import ConfigError, FailedPreconditionError, ResourceExhaustedError, SplitserveError


@dataclass(slots=True)
class RefusedClasses:
    """Memory of the control loop. Bounded by the classes of a policy."""

    _until_s: dict[PoolClass, float] = field(default_factory=dict)
    _now_s: float = 0.0
    _cold_s: Mapping[PoolName, float] = field(default_factory=dict)

    def at(self, now_s: float, cold_s: Mapping[PoolName, float]) -> frozenset[PoolClass]:
        """Pool and name of each. `cold_s`: how long a start takes now."""
        self._now_s, self._cold_s = now_s, cold_s
        self._until_s = {known: until for known, until in self._until_s.items() if until > now_s}
        return frozenset(self._until_s)

    def note(self, action: Action, error: SplitserveError) -> None:
        """An action has failed. One that may have been carried out, or never reached its host, says nothing."""
        if not isinstance(action, Start) or not action.replica_class:
            return
        if isinstance(error, ResourceExhaustedError | FailedPreconditionError | ConfigError):
            until_s = self._now_s + short_for_s(self._cold_s.get(action.pool, 0.0))
            self._until_s[action.pool, action.replica_class] = until_s


def to_do_without(names: Collection[str], short: Collection[str]) -> set[str]:
    """The classes of which none is to be started now. If all are short, all may be tried again."""
    found = set(names) & set(short)
    return set() if found == set(names) else found
