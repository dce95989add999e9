"""The engine thread's status for other threads: one immutable snapshot, replaced as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from engine.core.types import EngineLoad
from kv_transfer.lane import JudgedLane, LaneKind

WriteOutcome = Literal["completed", "failed"]


@dataclass(frozen=True, slots=True)
class HandoffWrites:
    """What a worker has written to others since its start."""

    by_lane: Mapping[tuple[LaneKind, WriteOutcome], int] = field(default_factory=lambda: MappingProxyType({}))
    descriptors: int = 0
    """Write descriptors of the completed handoffs."""
    contiguous_runs: int = 0
    """Runs of blocks that are contiguous at both ends, of the completed handoffs."""

    @property
    def completed(self) -> int:
        """Handoffs whose writes all ended well, over any lane."""
        return sum(count for (_, outcome), count in self.by_lane.items() if outcome == "completed")

    def ended(
        self, lane: LaneKind, outcome: WriteOutcome, descriptors: int = 0, runs: int = 0
    ) -> HandoffWrites:
        """These and one handoff more."""
        counted = {**self.by_lane, (lane, outcome): self.by_lane.get((lane, outcome), 0) + 1}
        return replace(
            self,
            by_lane=counted,
            descriptors=self.descriptors + descriptors,
            contiguous_runs=self.contiguous_runs + runs,
        )


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker at one moment. Created on the engine thread around each step; any thread may read it."""

    load: EngineLoad = field(default_factory=EngineLoad)
    in_progress: int = 0
    """What a drain waits for: pushes in flight, and requests where they are decoded."""
    transfers_in_flight: int = 0
    waiting_reservations: int = 0
    lanes: tuple[JudgedLane, ...] = ()
    usable_agents: frozenset[str] = frozenset()
    """Agent ids of peers that it may write to: connected, measured, not refused."""
    handoffs_completed: int = 0
    handoff_bytes: int = 0
    handoffs_rejected: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Handoffs that failed or were refused, by reason."""
    completions_rejected: int = 0
    """Those of them that this worker was to receive."""
    writes: HandoffWrites | None = None
    """None: it writes to nobody."""


def is_at_rest(load: EngineLoad) -> bool:
    """Whether nothing runs or waits in an engine, and no block of it has an owner: neither a request nor a writer."""
    return not (load.waiting_requests or load.running_requests) and load.free_blocks == load.total_blocks
