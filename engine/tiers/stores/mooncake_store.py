"""Slots in a Mooncake Store: memory of other machines, kept by its master and the nodes that lend it segments.

The package is `mooncake-transfer-engine-non-cuda` (or the one for the machine's CUDA), Apache-2.0; it needs
libibverbs. https://kvcache-ai.github.io/Mooncake describes the store and its server, `mooncake_master`.
"""

from __future__ import annotations

import importlib
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from engine.tiers.stores.block_store import BlockStore
from engine.tiers.stores.shared_store import SharedStore, shared_id_of
from engine.tiers.tier_index import TierBlock
from splitserve.errors import ConfigError, UnavailableError

FIELD = "engine.kv_store_master"
PACKAGE = "mooncake-transfer-engine-non-cuda"
_HEAD = struct.Struct("<32sQ")
"""Hash of the block, and XXH3-64 of its bytes."""
_PEER_TO_PEER = "P2PHANDSHAKE"
"""Clients tell each other where their segments are; no metadata server."""
_BUFFER_BYTES = 2**24
_NO_SUCH_KEY = -704
"""OBJECT_NOT_FOUND of the store's error codes."""


class MooncakeStore(BlockStore):
    """Slots of one worker in a store that many share. Nobody else reads them, and they outlive nobody: their names have
    a random part of the worker's. What the store evicts, or a node took with it, is not there."""

    def __init__(
        self, client: Any, block_bytes: int, slots: int, identity: bytes, name: str | None = None
    ) -> None:
        """`client`: a `MooncakeDistributedStore` that is set up; `close` closes it."""
        self.block_bytes, self.slots = block_bytes, slots
        self._client = client
        self._prefix = f"splitserve/{identity.hex()}/{name or secrets.token_hex(8)}"
        self._buffer = np.zeros(_HEAD.size + block_bytes, np.uint8)
        self._address, self._bytes = self._buffer.ctypes.data, self._buffer.data
        self._closed = False
        if code := client.register_buffer(self._address, self._buffer.nbytes):
            raise UnavailableError(f"{FIELD}: memory for blocks cannot be registered: error {code}")

    def write(self, slot: int, block: TierBlock, content: memoryview) -> None:
        """See `BlockStore`."""
        body = self._bytes[_HEAD.size :]
        body[:] = content
        _HEAD.pack_into(self._bytes, 0, block.block_hash, xxhash.xxh3_64_intdigest(body))
        code = self._put(block.block_hash)(
            self._key(slot, block.block_hash), self._address, self._buffer.nbytes
        )
        if code != 0:
            raise OSError(f"Mooncake Store took no block: error {code}")

    def read(self, slot: int, block_hash: bytes) -> memoryview | None:
        """See `BlockStore`."""
        got = self._client.get_into(self._key(slot, block_hash), self._address, self._buffer.nbytes)
        if got < 0 and got != _NO_SUCH_KEY:
            raise OSError(f"Mooncake Store gave no block: error {got}")
        if got != self._buffer.nbytes:
            return None
        held, checksum = _HEAD.unpack_from(self._bytes)
        body = self._bytes[_HEAD.size :]
        return body if (held, checksum) == (block_hash, xxhash.xxh3_64_intdigest(body)) else None

    def close(self) -> None:
        """See `BlockStore`."""
        if not self._closed:
            self._closed = True
            self._client.close()

    def _key(self, slot: int, block_hash: bytes) -> str:
        return f"{self._prefix}/{slot}"

    def _put(self, block_hash: bytes) -> Callable[[str, int, int], int]:
        """What of the client writes the buffer: over what is there."""
        return self._client.upsert_from  # type: ignore[no-any-return]


class SharedMooncakeStore(MooncakeStore, SharedStore):
    """Blocks under their hashes, for all workers of one identity. The store evicts what was used least recently."""

    def __init__(self, client: Any, block_bytes: int, slots: int, identity: bytes, master: str) -> None:
        """See `MooncakeStore`. `master`: the store's address, as all who share it must spell it."""
        super().__init__(client, block_bytes, slots, identity, name="shared")
        self.shared_id = shared_id_of(b"mooncake", master.encode(), identity)
        self._suspect: set[bytes] = set()
        """Blocks that were not there or damaged when they were read: written whatever is there."""

    def write(self, slot: int, block: TierBlock, content: memoryview) -> None:
        """See `BlockStore`."""
        super().write(slot, block, content)
        self._suspect.discard(block.block_hash)

    def read(self, slot: int, block_hash: bytes) -> memoryview | None:
        """See `BlockStore`."""
        content = super().read(slot, block_hash)
        if content is None:
            if len(self._suspect) >= self.slots:
                self._suspect.clear()
            self._suspect.add(block_hash)
        return content

    def held(self, hashes: Sequence[bytes]) -> int:
        """See `SharedStore`. One call."""
        found = self._client.batch_is_exist([self._key(0, each) for each in hashes])
        if len(found) != len(hashes) or min(found, default=0) < 0:
            raise OSError(f"Mooncake Store did not say what it has: {found[:1]}")
        return next((count for count, there in enumerate(found) if there != 1), len(found))

    def _key(self, slot: int, block_hash: bytes) -> str:
        return f"{self._prefix}/{block_hash.hex()}"

    def _put(self, block_hash: bytes) -> Callable[[str, int, int], int]:
        """The store moves no bytes for a block that it has, or that another worker is writing; that is no error."""
        client = self._client
        return client.upsert_from if block_hash in self._suspect else client.put_from  # type: ignore[no-any-return]


def open_mooncake_store(
    master: str,
    block_bytes: int,
    slots: int,
    identity: bytes,
    segment_bytes: int = 0,
    host: str | None = None,
    *,
    shared: bool = False,
) -> MooncakeStore:
    """Slots in the store of a `master` (HOST:PORT), to which this worker lends `segment_bytes` of its memory itself;
    `shared` with all workers of this identity.

    `host`: this machine's address for the store's other nodes; by default by its name. Raises ConfigError
    (`engine.kv_store_master`) without the package, and UnavailableError if the master does not answer.
    """
    try:
        store = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(f"{FIELD}: needs the package {PACKAGE}: {error}", field=FIELD) from None
    client = store.MooncakeDistributedStore()
    buffer_bytes = max(_BUFFER_BYTES, 4 * block_bytes)
    own = host or socket.gethostname()
    code = client.setup(own, _PEER_TO_PEER, segment_bytes, buffer_bytes, "tcp", "", master)
    if code:
        raise UnavailableError(f"{FIELD}: Mooncake's master {master} cannot be used: error {code}")
    if shared:
        return SharedMooncakeStore(client, block_bytes, slots, identity, master)
    return MooncakeStore(client, block_bytes, slots, identity)
