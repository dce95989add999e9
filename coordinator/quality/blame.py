"""Which workers and pairs are to blame for wrong answers, and which of them may be taken out of rotation. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.quality.target import Target
from coordinator.workers.snapshot import (
    CLOSED_CIRCUIT,
    NOT_ISOLATED,
    Isolation,
    PoolSnapshot,
    Worker,
    WorkerKey,
    has_pair,
)

FAILED_ROUNDS = 2
"""Failures in a row that condemn a target. The first raises the alarm; one alone may be a single flipped bit."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What the last rounds found of one target."""

    failures: int = 0
    """In a row; still 0 after one that was clean."""
    clean: int = 0
    """In a row since the last failure."""
    condemned: bool = False
    """Whether it has failed FAILED_ROUNDS times in a row, and has not had enough clean rounds since."""

    def after(self, *, failed: bool, clean_rounds: int) -> Standing:
        """The standing after one more answer; `clean_rounds` in a row acquit."""
        if failed:
            failures = self.failures + 1
            return Standing(failures, 0, self.condemned or failures >= FAILED_ROUNDS)
        clean = self.clean + 1
        return Standing(0, clean, self.condemned and clean < clean_rounds)

    @property
    def suspect(self) -> bool:
        """Whether it should be asked again soon."""
        return self.failures > 0 or self.condemned


@dataclass(frozen=True, slots=True)
class Blame:
    """Who is at fault, of each kind the most certain first."""

    prefills: tuple[WorkerKey, ...] = ()
    decodes: tuple[WorkerKey, ...] = ()
    pairs: tuple[Target, ...] = ()
    """Those that fail although their workers are right with others: the lane between them."""


NOBODY = Blame()


def blame(failing: Mapping[Target, bool]) -> Blame:
    """Who is at fault; `failing` says of each target with an answer whether it fails.

    A decode worker that fails alone is at fault itself, with all its pairs. Of what is left, a worker is at fault if at
    least two of its pairs fail and none is right; those that explain most failures come first, and of equals prefill
    workers, since they computed what is wrong. What nothing explains is the pair's own: its lane.
    """
    decodes = [target.decode for target, failed in failing.items() if target.prefill is None and failed]
    prefills: list[WorkerKey] = []
    pairs = {t: failed for t, failed in failing.items() if t.prefill is not None and t.decode not in decodes}
    while (guilty := _guiltiest(pairs)) is not None:
        (prefills if any(guilty == target.prefill for target in pairs) else decodes).append(guilty)
        pairs = {target: failed for target, failed in pairs.items() if guilty not in target.workers}
    return Blame(tuple(prefills), tuple(decodes), tuple(t for t, failed in pairs.items() if failed))


def _guiltiest(pairs: Mapping[Target, bool]) -> WorkerKey | None:
    """The worker with the most pairs, at least two, all of which fail; of equals a prefill worker."""
    counts: Counter[WorkerKey] = Counter()
    right: set[WorkerKey] = set()
    for target, failed in pairs.items():
        counts.update(target.workers)
        right |= set() if failed else set(target.workers)
    prefills = {target.prefill for target in pairs}
    ranked = [(counts[key], key in prefills, key) for key in counts if key not in right and counts[key] > 1]
    return max(ranked)[2] if ranked else None


def isolations(snapshot: PoolSnapshot, found: Blame) -> dict[WorkerKey, Isolation]:
    """What to take out of rotation: workers, then pairs, each only if a complete pair of its model remains without it
    and all before it."""
    isolated: dict[WorkerKey, Isolation] = {}
    by_key = {worker.key: worker for worker in snapshot.workers}
    for key in (*found.decodes, *found.prefills):
        if key in by_key:
            _isolate(snapshot, isolated, by_key[key], Isolation(worker=True))
    for pair in found.pairs:
        if pair.prefill in by_key and pair.decode in by_key:
            before = isolated.get(pair.prefill, NOT_ISOLATED)
            agents = before.agents | {by_key[pair.decode].agent_id}
            _isolate(snapshot, isolated, by_key[pair.prefill], replace(before, agents=agents))
    return isolated


def _isolate(
    snapshot: PoolSnapshot, isolated: dict[WorkerKey, Isolation], worker: Worker, isolation: Isolation
) -> None:
    tried = isolated | {worker.key: isolation}
    if _serves([w for w in snapshot.workers if w.model.name == worker.model.name], tried):
        isolated[worker.key] = isolation


def _serves(workers: Sequence[Worker], isolated: Mapping[WorkerKey, Isolation]) -> bool:
    """Whether a complete pair takes requests. Breakers do not count: they give way where nothing else is left."""
    left = [replace(w, circuit=CLOSED_CIRCUIT, isolation=isolated.get(w.key, NOT_ISOLATED)) for w in workers]
    return has_pair([worker for worker in left if worker.accepts])
