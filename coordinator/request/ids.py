"""Random ids and seeds. A request needs three, so random bytes are fetched from the system in bulk."""

from __future__ import annotations

import os

POOL_BYTES = 4096
CHAT_PREFIX, COMPLETION_PREFIX = "chatcmpl-", "cmpl-"
"""What the id of an OpenAI answer begins with; the request's id follows."""


class RandomPool:
    """A buffer of cryptographic random bytes, each used once. Not thread-safe."""

    def __init__(self) -> None:
        self._bytes = b""
        self._used = 0

    def take(self, count: int) -> bytes:
        """`count` random bytes, at most POOL_BYTES."""
        if self._used + count > len(self._bytes):
            self._bytes, self._used = os.urandom(POOL_BYTES), 0
        self._used += count
        return self._bytes[self._used - count : self._used]


_POOL = RandomPool()


def random_hex(digits: int = 32) -> str:
    """A string of random hexadecimal digits; `digits` must be even."""
    return _POOL.take(digits // 2).hex()


def random_bits(count: int) -> int:
    """A random integer from 0 to 2**count - 1."""
    return int.from_bytes(_POOL.take((count + 7) // 8)) >> (-count % 8)


def names_of(given: str) -> tuple[str, ...]:
    """The request ids that a client may mean by an id: its own, that in an answer's id, the first choice's."""
    for prefix in (CHAT_PREFIX, COMPLETION_PREFIX):
        if given.startswith(prefix):
            inner = given.removeprefix(prefix)
            return given, inner, choice_id(inner, 0)
    return given, choice_id(given, 0)


def choice_id(request_id: str, index: int) -> str:
    """The request id of one of several choices."""
    return f"{request_id}-{index}"
