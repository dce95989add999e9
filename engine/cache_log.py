"""What the prefix cache has gained and lost, told to every coordinator: one log, a place in it for each listener.

The engine thread writes, the event loop reads. A listener that falls behind the bounded log starts anew with a
snapshot. Names are `splitserve.block_hashes.name_of` a block's hash: 8 bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import islice

from splitserve.block_hashes import name_of
from splitserve.v1 import registry_pb2

MAX_LOGGED = 2**15
"""Changes kept for listeners that have not read them yet."""
MAX_NAMES_A_MESSAGE = 2**12
"""Far below the bound of the proto: 32 KiB fit every message limit, and take a coordinator few milliseconds."""


class CacheLog:
    """The names that are cached now, and the last changes. Writing costs O(1) a change."""

    def __init__(self, max_logged: int = MAX_LOGGED) -> None:
        self._lock = threading.Lock()
        self._names: dict[bytes, None] = {}
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=max_logged)
        self._end = 0
        self._unread = False
        self._on_change: Callable[[], object] | None = None

    def tell(self, on_change: Callable[[], object]) -> None:
        """Calls this, on the engine thread, at the first change after each reading."""
        self._on_change = on_change

    def stored(self, block_hash: bytes) -> None:
        """A block of this hash is cached from now on."""
        self._changed(name_of(block_hash), True)

    def removed(self, block_hash: bytes) -> None:
        """No block of this hash is cached any more."""
        self._changed(name_of(block_hash), False)

    def _changed(self, name: bytes, is_stored: bool) -> None:
        with self._lock:
            if is_stored:
                self._names[name] = None
            else:
                self._names.pop(name, None)
            self._changes.append((name, is_stored))
            self._end += 1
            first, self._unread = not self._unread, True
        if first and self._on_change is not None:
            self._on_change()

    def snapshot(self) -> tuple[dict[bytes, bool], int]:
        """All names that are cached now, parents before children, and the place in the log after them."""
        with self._lock:
            self._unread = False
            return dict.fromkeys(self._names, True), self._end

    def since(self, place: int) -> tuple[dict[bytes, bool], int] | None:
        """What became of each name that changed since a place: True where it is cached now; and the new place.

        None when the log does not reach back so far.
        """
        with self._lock:
            missed = self._end - place
            if missed > len(self._changes):
                return None
            self._unread = False
            latest = list(islice(reversed(self._changes), missed))  # from its end: costs O(missed)
            return dict(reversed(latest)), self._end


class CacheSession:
    """One Report stream's place in the log. Its first events, and those after `resync`, tell the whole cache."""

    def __init__(self, log: CacheLog) -> None:
        self._log = log
        self._sequence = 0
        self._place = -1
        self._untold: deque[tuple[bytes, bool]] = deque()
        self._resync = True

    @property
    def has_more(self) -> bool:
        """Whether more is to be told than fitted into the last events."""
        return bool(self._untold) or self._resync

    def resync(self) -> None:
        """The coordinator has lost what it was told."""
        self._resync = True

    def next_events(self) -> registry_pb2.CacheEvents | None:
        """The next message, None when nothing has changed. It counts as sent."""
        cleared = self._resync
        if not self._resync and not self._untold:
            news = self._log.since(self._place)
            if news is None:
                cleared = True
            else:
                self._untold, self._place = deque(news[0].items()), news[1]
        if cleared:
            names, self._place = self._log.snapshot()
            self._untold, self._resync = deque(names.items()), False
        elif not self._untold:
            return None
        told = [self._untold.popleft() for _ in range(min(len(self._untold), MAX_NAMES_A_MESSAGE))]
        self._sequence += 1
        return registry_pb2.CacheEvents(
            sequence=self._sequence,
            cleared=cleared,
            removed=b"".join(name for name, is_stored in told if not is_stored),
            stored=b"".join(name for name, is_stored in told if is_stored),
        )
