"""The log of prefix-cache changes that workers report to coordinators, and a reader with its own position for each.

The engine thread writes, the event loop reads. A reader that falls behind the bounded log starts again with a snapshot.
A name is `splitserve.generation.kv_blocks.name_of` a block's hash: 8 bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Literal

from splitserve.generation.kv_blocks import NAMES_A_MESSAGE, name_of
from splitserve.v1 import registry_pb2

Place = Literal["pool", "host", "disk"]
"""Where a block is cached: among the KV blocks, or in a tier below them."""
Where = Place | Literal["lost"] | None
"""None: nowhere. Lost: nor in the store that workers share, where it may be believed to be."""
Change = tuple[bytes, Where]
"""A name, and where its block is cached now."""
MAX_LOGGED = 2**15
"""Changes kept for readers that have not read them yet."""


class KvEventLog:
    """The names that are cached now, and the last changes. A change costs O(1)."""

    def __init__(self, max_logged: int = MAX_LOGGED) -> None:
        self._lock = threading.Lock()
        self.tiered = False
        """Whether blocks may be cached elsewhere than in the pool. Set it before anybody reads."""
        self._names: dict[bytes, Place] = {}
        self._changes: deque[Change] = deque(maxlen=max_logged)
        self._end = 0
        self._unread = False
        self._on_change: Callable[[], object] | None = None

    def subscribe(self, on_change: Callable[[], object]) -> None:
        """Calls `on_change` on the engine thread, at the first change after each read."""
        self._on_change = on_change

    def stored(self, block_hash: bytes, place: Place = "pool") -> None:
        """Records that a block with this hash is cached now, and where: the nearest place."""
        self._changed(name_of(block_hash), place)

    def removed(self, block_hash: bytes, *, lost: bool = False) -> None:
        """Records that no block with this hash is cached any more; `lost`: nor in a store that workers share."""
        self._changed(name_of(block_hash), "lost" if lost else None)

    def _changed(self, name: bytes, place: Where) -> None:
        with self._lock:
            if place is not None and place != "lost":
                self._names[name] = place
            else:
                self._names.pop(name, None)
            self._changes.append((name, place))
            self._end += 1
            first, self._unread = not self._unread, True
        if first and self._on_change is not None:
            self._on_change()

    def snapshot(self) -> tuple[dict[bytes, Where], int]:
        """All names that are cached now, parents before children, with their places, and the position in the log."""
        with self._lock:
            self._unread = False
            return {**self._names}, self._end

    def since(self, position: int) -> tuple[dict[bytes, Where], int] | None:
        """The names that changed since a position, with the places of those cached now; and the new position.

        None if the log does not reach back that far.
        """
        with self._lock:
            missed = self._end - position
            if missed > len(self._changes):
                return None
            self._unread = False
            latest = list(islice(reversed(self._changes), missed))  # from the end: costs O(missed)
            return dict(reversed(latest)), self._end


class KvEventReader:
    """Reads the log for one Report stream. The first events, and those after `resync`, list the whole cache."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._sequence = 0
        self._position = -1
        self._unsent: deque[Change] = deque()
        self._resync = True

    @property
    def has_more(self) -> bool:
        """Whether there is more to send than fitted into the last message."""
        return bool(self._unsent) or self._resync

    def resync(self) -> None:
        """Starts again with a snapshot: the coordinator has lost its copy."""
        self._resync = True

    def next_events(self) -> registry_pb2.CacheEvents | None:
        """The next message, None if nothing has changed. The message counts as sent."""
        cleared = self._resync
        if not self._resync and not self._unsent:
            changes = self._log.since(self._position)
            if changes is None:
                cleared = True
            else:
                self._unsent, self._position = deque(changes[0].items()), changes[1]
        if cleared:
            names, self._position = self._log.snapshot()
            self._unsent, self._resync = deque(names.items()), False
        elif not self._unsent:
            return None
        sent = [self._unsent.popleft() for _ in range(min(len(self._unsent), NAMES_A_MESSAGE))]
        self._sequence += 1
        return registry_pb2.CacheEvents(
            sequence=self._sequence,
            cleared=cleared,
            removed=_names_at(None, sent) + (lost := _names_at("lost", sent)),
            lost=lost,
            stored=_names_at("pool", sent),
            in_host=_names_at("host", sent),
            on_disk=_names_at("disk", sent),
            tiered=self._log.tiered,
        )


def _names_at(place: Where, changes: Sequence[Change]) -> bytes:
    return b"".join(name for name, at in changes if at == place)
