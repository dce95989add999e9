"""Finds the tenant of an API key in constant time."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping

from coordinator.caller import Caller
from coordinator.tenants.policy_file import TenantBook
from splitserve.api_keys import HASH_PREFIX, MAX_KEY_CHARACTERS


class KeyRing:
    """The callers by their keys' hashes; never changed once built.

    Hashes are looked up under a second, keyed hash whose key is random at each start. So how long a look-up takes
    tells nothing about how much of a hash was right, and it costs the same for ten tenants and for ten thousand.
    """

    def __init__(self, book: TenantBook) -> None:
        self._blind = secrets.token_bytes(32)
        self._callers: Mapping[bytes, Caller] = dict(self._entries(book))

    def find(self, key: str) -> Caller | None:
        """The holder of this key, whatever text it is."""
        if len(key) > MAX_KEY_CHARACTERS:
            return None
        return self._callers.get(self._blinded(hashlib.sha256(key.encode("utf-8", "replace")).digest()))

    def _entries(self, book: TenantBook) -> Iterable[tuple[bytes, Caller]]:
        for policy in book.file.tenants:
            caller = book.caller(policy)
            for hashed in policy.key_hashes:
                yield self._blinded(bytes.fromhex(hashed.removeprefix(HASH_PREFIX))), caller

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._blind, digest, "sha256")
