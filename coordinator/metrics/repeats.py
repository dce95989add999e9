"""Tells whether a request is one that was refused before and comes again, so that demand counts once. Pure.

Each refusal excuses one later request of the same tenant with the same prompt and limits from being counted as demand.
Clients that were refused a prompt and then send it as a request of its own are taken for the same client.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

KEPT_S = 120.0
"""How long a refusal is remembered: twice the longest hint when to come again."""
MAX_KEPT = 65_536


class RefusedRequests:
    """Refusals of the last `KEPT_S` seconds, `MAX_KEPT` prompts at most. `now` on any monotonic clock, seconds.

    A `request` is what makes two equal: model, tenant, prompt and limits.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[int, tuple[int, float]] = OrderedDict()
        """Refusals not excused yet and the time of the last one, by fingerprint, the oldest first."""

    def add(self, request: Hashable, now: float) -> None:
        """A request was refused."""
        key = hash(request)
        count, _ = self._refused.pop(key, (0, now))
        self._refused[key] = count + 1, now
        self._forget(now)

    def take(self, request: Hashable, now: float) -> bool:
        """Whether this request repeats a refused one; that refusal is used up. Costs nothing while none was refused."""
        self._forget(now)
        if not self._refused:
            return False
        key = hash(request)
        count, at_s = self._refused.get(key, (0, 0.0))
        if count > 1:
            self._refused[key] = count - 1, at_s
        elif count:
            del self._refused[key]
        return count > 0

    def _forget(self, now: float) -> None:
        while self._refused:
            _, at_s = next(iter(self._refused.values()))
            if now - at_s <= KEPT_S and len(self._refused) <= MAX_KEPT:
                return
            self._refused.popitem(last=False)
