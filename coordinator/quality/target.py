"""What a golden prompt is sent to: a pair of workers, or a decode worker alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from coordinator.workers.snapshot import PoolSnapshot, Worker, WorkerKey


class Target(NamedTuple):
    """A pair; without a prefill worker the decode worker computes the prompt itself, as the control of its pairs."""

    prefill: WorkerKey | None
    decode: WorkerKey

    @property
    def workers(self) -> tuple[WorkerKey, ...]:
        """The keys of its workers."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def prefill_name(self) -> str:
        """Id of its prefill worker; empty without one."""
        return self.prefill[0] if self.prefill is not None else ""


def targets_of(snapshot: PoolSnapshot, model: str) -> list[Target]:
    """All targets of a model: decode workers alone, then pairs so that consecutive ones share no worker.

    Workers and pairs out of rotation are among them, so that they can prove themselves.
    """
    usable = [w for w in snapshot.workers if w.model.name == model and w.usable and w.joined]
    prefills = [w for w in usable if w.computes_prompts]
    decodes = [w for w in usable if w.decodes]
    reached = [d for d in decodes if d.neutral or any(d.agent_id in p.connected_agents for p in prefills)]
    return [*(Target(None, d.key) for d in reached), *_pairs(prefills, decodes)]


def _pairs(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> Iterator[Target]:
    if not prefills or not decodes:
        return
    more, fewer = max(len(prefills), len(decodes)), min(len(prefills), len(decodes))
    for shift in range(fewer):
        for at in range(more):
            wrapped = (at + shift) % fewer
            p, d = (at, wrapped) if len(prefills) == more else (wrapped, at)
            if decodes[d].agent_id in prefills[p].connected_agents:
                yield Target(prefills[p].key, decodes[d].key)


def targets_of_round(
    targets: Sequence[Target], suspects: Iterable[Target], turn: int, most: int
) -> list[Target]:
    """At most `most` targets of one round: up to half of it suspects, then the others from position `turn` on."""
    if len(targets) <= most:
        return list(targets)
    wanted = set(suspects)
    first = [target for target in targets if target in wanted][: most // 2]
    start = turn % len(targets)
    others = [t for t in (*targets[start:], *targets[:start]) if t not in first]
    return first + others[: most - len(first)]
