"""The decisions of autoscalers and their reasons, from their plans, for people to see. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitserve.errors import InvalidArgumentError
from splitserve.v1 import registry_pb2, scaling_pb2

MAX_DECISIONS = 2
MAX_ENTRIES = 200
"""Decisions that the timeline keeps."""
MAX_CAUSE, MAX_REASON, MAX_MODEL = 64, 1024, 128
MAX_LATEST = 64
"""Most models and pools whose latest decision is kept; the oldest is dropped."""
MAX_ACTIONS, MAX_ACTION = 16, 200
"""Most actions of a decision, and characters of each; the rest is cut."""
_POOLS = {registry_pb2.POOL_PREFILL: "prefill", registry_pb2.POOL_DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """A decision about one pool, from its first plan until another one differed."""

    at_unix_s: float
    model: str
    """Empty if the autoscaler scales a single model or all models."""
    pool: str
    desired: int
    standby: int
    ready: int
    starting: int
    cause: str
    reason: str
    """From the latest of these plans; its figures change from plan to plan."""
    actions: tuple[str, ...]
    """The next actions of the autoscaler."""


class ScalingTimeline:
    """The latest decisions, oldest first, at most `MAX_ENTRIES`."""

    def __init__(self) -> None:
        self._entries: deque[TimelineEntry] = deque(maxlen=MAX_ENTRIES)
        self._latest: dict[tuple[str, str], TimelineEntry] = {}

    @property
    def entries(self) -> Sequence[TimelineEntry]:
        """The kept decisions, oldest first."""
        return tuple(self._entries)

    @property
    def latest(self) -> Sequence[TimelineEntry]:
        """The last decision about each pool of each model, counts and reason as of the last plan."""
        order = list(_POOLS.values())
        return tuple(sorted(self._latest.values(), key=lambda entry: (entry.model, order.index(entry.pool))))

    def add(self, request: scaling_pb2.ApplyPlanRequest, now_unix_s: float) -> None:
        """Takes the decisions of a checked plan. A decision that differs from the one before gets an entry."""
        for decision in request.decisions:
            entry = TimelineEntry(
                at_unix_s=now_unix_s,
                model=decision.model[:MAX_MODEL],
                pool=_POOLS[decision.pool],
                desired=decision.desired,
                standby=decision.standby,
                ready=decision.ready,
                starting=decision.starting,
                cause=decision.cause[:MAX_CAUSE],
                reason=decision.reason[:MAX_REASON],
                actions=tuple(text[:MAX_ACTION] for text in decision.next_actions[:MAX_ACTIONS]),
            )
            before = self._latest.pop((entry.model, entry.pool), None)
            if before is None or _essence(before) != _essence(entry):
                self._entries.append(entry)
            else:
                entry = replace(entry, at_unix_s=before.at_unix_s)
            self._latest[entry.model, entry.pool] = entry
            if len(self._latest) > MAX_LATEST:
                del self._latest[next(iter(self._latest))]


def check_decisions(request: scaling_pb2.ApplyPlanRequest) -> None:
    """Raises InvalidArgumentError naming field and bound."""
    decisions = request.decisions
    if len(decisions) > MAX_DECISIONS:
        message = f"decisions must be at most {MAX_DECISIONS}, not {len(decisions)}"
        raise InvalidArgumentError(message, field="decisions")
    if any(decision.pool not in _POOLS for decision in decisions):
        message = "decisions.pool must be POOL_PREFILL or POOL_DECODE"
        raise InvalidArgumentError(message, field="decisions.pool")


def _essence(entry: TimelineEntry) -> tuple[object, ...]:
    """The fields by which decisions differ: neither the counts of present replicas nor the reason's text."""
    return entry.desired, entry.standby, entry.cause, entry.actions
