"""Changes of vLLM's prefix cache, under the names by which coordinators know blocks."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventPublisher

from engine.kv_cache.cache_events import KvEventLog
from splitserve.generation.kv_blocks import block_hash


class PrefixEvents(EventPublisher):
    """Takes vLLM's events within the process; vLLM's scheduler calls it at the end of a step.

    vLLM's own hashes are replaced by splitserve's, which follow from the block's tokens and the hash of its parent.
    """

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._names: dict[Any, bytes] = {}

    def publish(self, events: Any) -> None:
        """Translates a batch of events."""
        for event in events.events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    for known in event.block_hashes:
                        if (name := self._names.pop(known, None)) is not None:
                            self._log.removed(name)
                case AllBlocksCleared():
                    for name in self._names.values():
                        self._log.removed(name)
                    self._names.clear()

    def shutdown(self) -> None:
        """Nothing to release."""

    def _stored(self, event: Any) -> None:
        parent = None if event.parent_block_hash is None else self._names.get(event.parent_block_hash)
        if parent is None and event.parent_block_hash is not None:
            return  # a child of a block that was removed meanwhile cannot be found any more
        for index, known in enumerate(event.block_hashes):
            tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            salt = _salt(event.extra_keys[index]) if parent is None and event.extra_keys else ()
            parent = block_hash(parent, tokens, salt)
            self._names[known] = parent
            self._log.stored(parent)


def salt_text(salt: bytes) -> str | None:
    """A cache salt as vLLM takes it; None without one."""
    return salt.hex() or None


def _salt(extra_keys: Any) -> tuple[bytes, ...]:
    """The salt of a first block, from the keys that vLLM hashed with it: an adapter's name, then the salt.

    A request with an adapter always has a salt.
    """
    return tuple(bytes.fromhex(key) for key in (extra_keys or ())[-1:])
