"""When a new worker begins to count: once it is connected with all that count already. Pure.

Routing only uses pairs that are connected. But a worker that is connected with one peer of eight would draw the
traffic of all to that one, or from that one, until the other lanes are there.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.pools import Worker

JOIN_WAIT_S = 10.0
"""A lane that is not there after so long holds a worker up no longer: its peer may be stuck."""


def may_join(worker: Worker, others: Iterable[Worker], waited_s: float) -> bool:
    """Whether a usable worker may join. `others` are all workers; `waited_s` is how long it has been usable."""
    model, pool = worker.model.name, worker.pool
    peers = (w for w in others if w.joined and w.usable and w.model.name == model and w.pool != pool)
    return waited_s >= JOIN_WAIT_S or all(_is_settled(worker, peer) for peer in peers)


def _is_settled(worker: Worker, peer: Worker) -> bool:
    """Whether the lane is there, or will not come because it is too slow to be used."""
    prefill, decode = (worker, peer) if worker.pool == "prefill" else (peer, worker)
    refused = any(lane.refused and lane.agent_id == decode.agent_id for lane in prefill.lanes)
    return refused or prefill.reaches(decode)
