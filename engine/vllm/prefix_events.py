"""Follows the changes of vLLM's prefix cache, and names its blocks by splitserve's hashes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from vllm.distributed import kv_events
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from engine.kv_cache.block_pool import KvEventLog
from splitserve.generation.kv_blocks import block_hash
from splitserve.logs import log_event


class PrefixEvents:
    """Applies the events that vLLM's scheduler publishes.

    If a model's layers form several groups, the first group stands for all. Blocks that vLLM has offloaded to main
    memory are cached, too. An event that was lost stays missing until its block changes again. So `log` and
    `cached_blocks` are hints for the router.
    """

    def __init__(self, log: KvEventLog) -> None:
        self.log = log
        self._hashes: dict[Any, bytes] = {}
        """The hashes of the cached blocks, by vLLM's hashes."""
        self._cached: dict[bytes, set[str | None]] = {}
        """Where these blocks are, by their hashes: on the device, in main memory, or both."""
        self._next_sequence = 0

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
        """Returns how many of a sequence's leading blocks, given by their hashes, are cached. Any thread."""
        return next((index for index, name in enumerate(hashes) if name not in self._cached), len(hashes))

    def take(self, sequence: int, batch: KVEventBatch) -> None:
        """Applies a batch of events. `sequence` counts vLLM's batches from 0."""
        if sequence != self._next_sequence:
            log_event("prefix_events.lost", batches=sequence - self._next_sequence)
        self._next_sequence = sequence + 1
        for event in batch.events:
            match event:
                case BlockStored(medium=kv_events.MEDIUM_CPU):
                    for vllm_hash in self._hashes.keys() & event.block_hashes:
                        self._cached[self._hashes[vllm_hash]].add(event.medium)
                case BlockStored() if not event.group_idx:
                    self._stored(event)
                case BlockRemoved() if not event.group_idx:
                    for vllm_hash in event.block_hashes:
                        self._removed(vllm_hash, event.medium)
                case AllBlocksCleared():
                    for vllm_hash in list(self._hashes):
                        self._removed(vllm_hash, kv_events.MEDIUM_GPU)

    def _read(self, subscriber: Any) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while True:
            _topic, sequence, payload = subscriber.recv_multipart()
            self.take(int.from_bytes(sequence, "big"), decoder.decode(payload))

    def _stored(self, event: BlockStored) -> None:
        parent = None if event.parent_block_hash is None else self._hashes.get(event.parent_block_hash)
        # vLLM has removed the parent meanwhile, so no prompt finds its children any more.
        if parent is None and event.parent_block_hash is not None:
            return
        for index, vllm_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            # vLLM hashes a prompt's first block with an adapter's name and the salt, if it has them. A request with an
            # adapter always has a salt (`chain_salt`), so the last key is the salt.
            keys = event.extra_keys[index] if parent is None and event.extra_keys else None
            parent = block_hash(parent, tokens, [bytes.fromhex(key) for key in (keys or ())[-1:]])
            self._hashes[vllm_hash] = parent
            self._cached.setdefault(parent, set()).add(event.medium)
            self.log.stored(parent)

    def _removed(self, vllm_hash: Any, medium: str | None) -> None:
        name = self._hashes.get(vllm_hash)
        if name is None:
            return
        self._cached[name].discard(medium)
        if not self._cached[name]:
            del self._hashes[vllm_hash], self._cached[name]
            self.log.removed(name)
