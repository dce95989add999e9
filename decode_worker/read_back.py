"""Whether a reservation waits for its prefix to be read from the tiers below the KV blocks."""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.reservation_queue import WaitingReservation
from engine.core.engine import Engine


def reads_back(core: Engine, entry: WaitingReservation, then: Callable[[], None]) -> bool:
    """Begins to read what lower tiers have of a prefix that a peer would have to transfer otherwise; whether it has.

    Then `then` is called on the engine thread. Blocks are reserved only after that, and the ticket says of the prefix
    what is in the pool by then: nothing decodes behind blocks that may not come. A prompt that is computed here has
    its blocks read as any prompt, and a prefix that is fetched does not wait.
    """
    request = entry.request
    if not entry.lane_bytes_per_s or request.prefix_only:
        return False
    if entry.local_prefill_tokens and entry.computes_here(core.cached_tokens(request)):
        return False
    return core.read_back(request, entry.lane_bytes_per_s, then)
