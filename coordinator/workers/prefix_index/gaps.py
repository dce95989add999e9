"""Of which workers' caches the prefix index does not know everything. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.workers.snapshot import WorkerKey


class Gaps:
    """True while there is any worker of whose cache something may be missing."""

    def __init__(self) -> None:
        self._untold: set[WorkerKey] = set()
        self._evicted: set[WorkerKey] = set()

    def __bool__(self) -> bool:
        return bool(self._untold or self._evicted)

    def told(self, worker: WorkerKey, *, lost: bool, cleared: bool, full: bool) -> None:
        """A message came. `lost`: it is ignored, after another one that was missed; `full`: more may follow it."""
        if cleared:
            self._evicted.discard(worker)
        if lost or full:
            self._untold.add(worker)
        else:
            self._untold.discard(worker)

    def evicted(self, workers: Iterable[WorkerKey]) -> None:
        """Keys had to go that these may hold, and still do: nothing says so until they resend their whole caches."""
        self._evicted.update(workers)

    def forget(self, worker: WorkerKey) -> None:
        """The worker is gone."""
        self._untold.discard(worker)
        self._evicted.discard(worker)
