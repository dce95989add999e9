"""Prefixes that prompts share, with their tokens: what a new worker is seeded with. Pure.

The prefix index knows blocks by name alone, and a fetch needs their tokens. So the tokens of each prefix that a request
finds in some cache are kept, within a bound, with how often it was found; half of that is forgotten in `HALF_LIFE_S`.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.generation.kv_blocks import Adapter

MAX_TOKENS = 2**20
"""Of all prefixes kept: 4 MiB, and what their entries take."""
MAX_ENTRIES = 4096
HALF_LIFE_S = 300.0
LEAST_USES = 1.5
"""Of a prefix that a worker is seeded with: one that was found once only, and not just now, may never be again."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens from the beginning of a prompt, and whose they are."""

    model: str
    """As requests name it: an adapter's name, or a base model's."""
    token_ids: Sequence[int]
    cache_salt: bytes = b""
    adapter: Adapter | None = None


@dataclass(slots=True)
class _Entry:
    prefix: Prefix
    key: int
    uses: float
    seen_s: float

    def uses_at(self, now: float) -> float:
        return self.uses * math.exp2((self.seen_s - now) / HALF_LIFE_S)


class HotPrefixes:
    """The prefixes found last, and how often. The least recently found are forgotten first."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._entries: OrderedDict[tuple[str, int], _Entry] = OrderedDict()
        self._tokens = 0

    def found(self, key: int, prefix: Prefix, tokens: int, now: float) -> None:
        """A request has found its first `tokens` in a cache. `key`: the index's key of the last block of them, which
        stands for all before. `prefix` may be longer. Costs O(tokens) the first time, O(1) later."""
        name = (prefix.model, key)
        entry = self._entries.get(name)
        if entry is not None:
            entry.uses, entry.seen_s = entry.uses_at(now) + 1, now
            self._entries.move_to_end(name)
            return
        if tokens > self._max_tokens:
            return
        kept = Prefix(prefix.model, array("I", prefix.token_ids[:tokens]), prefix.cache_salt, prefix.adapter)
        self._entries[name] = _Entry(kept, key, 1.0, now)
        self._tokens += tokens
        while self._tokens > self._max_tokens or len(self._entries) > MAX_ENTRIES:
            _, oldest = self._entries.popitem(last=False)
            self._tokens -= len(oldest.prefix.token_ids)

    def hottest(self, models: Sequence[str], count: int, now: float) -> list[Prefix]:
        """Up to `count` prefixes of these models that spare the most computing: by uses times tokens."""
        worth = (
            (entry.uses_at(now) * len(entry.prefix.token_ids), (entry.prefix.model, entry.key))
            for entry in self._entries.values()
            if entry.prefix.model in models and entry.uses_at(now) >= LEAST_USES
        )
        return [self._entries[name].prefix for _, name in heapq.nlargest(count, worth)]
