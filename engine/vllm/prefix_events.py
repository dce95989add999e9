"""The changes of vLLM's prefix cache, as splitserve names its blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from engine.kv_cache.block_pool import KvEventLog
from splitserve.generation.kv_blocks import block_hash
from splitserve.logs import log_event


class PrefixEvents:
    """Follows vLLM's events, which its scheduler's process publishes at a Unix socket.

    vLLM's own hashes are replaced by splitserve's, which follow from the block's tokens and the hash of its parent. Of
    several groups of layers the first one tells. Events that were lost are missing here until their blocks change
    again: what the log says is a hint, for the router and for `cached_blocks`.
    """

    def __init__(self, log: KvEventLog) -> None:
        self.log = log
        self._names: dict[Any, bytes] = {}
        self._cached: set[bytes] = set()
        self._next = 0

    def follow(self, address: str) -> None:
        """Starts a thread that reads the events at a ZeroMQ address."""
        subscriber = zmq.Context.instance().socket(zmq.SUB)
        subscriber.setsockopt(zmq.RCVHWM, 0)
        subscriber.connect(address)
        subscriber.subscribe(b"")
        threading.Thread(
            target=self._read, args=(subscriber,), name="vllm-prefix-events", daemon=True
        ).start()

    def cached_blocks(self, hashes: Sequence[bytes]) -> int:
        """How many of a sequence's first blocks are cached, by their hashes. Any thread."""
        return next((index for index, name in enumerate(hashes) if name not in self._cached), len(hashes))

    def take(self, sequence: int, batch: KVEventBatch) -> None:
        """Takes the batch of this number."""
        if sequence != self._next:
            log_event("prefix_events.lost", batches=sequence - self._next)
        self._next = sequence + 1
        for event in batch.events:
            match event:
                case BlockStored() if not event.group_idx:
                    self._stored(event)
                case BlockRemoved() if not event.group_idx:
                    for known in event.block_hashes:
                        self._removed(self._names.pop(known, None))
                case AllBlocksCleared():
                    for name in self._names.values():
                        self._removed(name)
                    self._names.clear()

    def _read(self, subscriber: Any) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while True:
            _topic, sequence, payload = subscriber.recv_multipart()
            self.take(int.from_bytes(sequence, "big"), decoder.decode(payload))

    def _stored(self, event: BlockStored) -> None:
        parent = None if event.parent_block_hash is None else self._names.get(event.parent_block_hash)
        if parent is None and event.parent_block_hash is not None:
            return  # a child of a block that was removed meanwhile cannot be found any more
        for index, known in enumerate(event.block_hashes):
            tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            salt = _salt(event.extra_keys[index]) if parent is None and event.extra_keys else ()
            parent = block_hash(parent, tokens, salt)
            self._names[known] = parent
            self._cached.add(parent)
            self.log.stored(parent)

    def _removed(self, name: bytes | None) -> None:
        if name is not None:
            self._cached.discard(name)
            self.log.removed(name)


def salt_text(salt: bytes) -> str | None:
    """A cache salt as vLLM takes it; None without one."""
    return salt.hex() or None


def _salt(extra_keys: Any) -> tuple[bytes, ...]:
    """The salt of a first block, from the keys that vLLM hashed with it: an adapter's name, then the salt.

    A request with an adapter always has a salt.
    """
    return tuple(bytes.fromhex(key) for key in (extra_keys or ())[-1:])
