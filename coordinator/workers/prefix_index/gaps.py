"""Of which workers' caches the prefix index does not know everything. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.workers.snapshot import WorkerKey


class Gaps:
    """Workers of whose caches something may be missing."""

    def __init__(self) -> None:
        self.any = False
        """Whether there are such workers."""
        self._untold: set[WorkerKey] = set()
        self._evicted: set[WorkerKey] = set()

    def told(self, worker: WorkerKey, *, lost: bool, cleared: bool, full: bool) -> None:
        """A message came. `lost`: it is ignored, after another one that was missed; `full`: more may follow it."""
        if cleared:
            self._evicted.discard(worker)
        if lost or full:
            self._untold.add(worker)
        else:
            self._untold.discard(worker)
        self._update()

    def evicted(self, workers: Iterable[WorkerKey]) -> None:
        """Keys had to go that these may hold, and still do: nothing says so until they resend their whole caches."""
        self._evicted.update(workers)
        self._update()

    def forget(self, worker: WorkerKey) -> None:
        """The worker is gone."""
        self._untold.discard(worker)
        self._evicted.discard(worker)
        self._update()

    def _update(self) -> None:
        self.any = bool(self._untold or self._evicted)
