"""API keys: format, storage and transmission.

A key has 256 random bits; the tenants file stores only its SHA-256. Slow password hashes (bcrypt, argon2) protect
guessable, human-chosen secrets. 256 random bits cannot be guessed, so a fast hash is equally safe and costs a
microsecond per request instead of a tenth of a second.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from splitserve.errors import InvalidArgumentError
from splitserve.runtime.bounded_file import read_named_text

KEY_PREFIX = "ss-"
"""Lets secret scanners recognize a leaked key."""
KEY_BYTES = 32
MAX_KEY_CHARACTERS = 512
"""Longer keys are refused without hashing them."""
HASH_PREFIX = "sha256:"
API_KEY_VARIABLE = "SPLITSERVE_API_KEY"


def new_key() -> str:
    """A new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_hash(key: str) -> str:
    """The key's hash in the tenants file: `sha256:` and 64 hexadecimal digits."""
    return HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()


def checked_key(key: str | None) -> str | None:
    """Returns the key. Raises InvalidArgumentError, without the key in it, for one that no header can carry."""
    if key is not None and not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isascii() and key.isprintable()):
        bound = f"1..{MAX_KEY_CHARACTERS} printable ASCII characters"
        raise InvalidArgumentError(f"api_key must be {bound}", field="api_key")
    return key


def read_key(path: Path | None) -> str | None:
    """The key in a file; None without a path. Raises ConfigError or InvalidArgumentError naming the setting."""
    if path is None:
        return None
    return checked_key(read_named_text(path, "api_key_file").strip())


def key_metadata(key: str | None) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that carries the key; empty for None."""
    return (("authorization", f"Bearer {key}"),) if key is not None else ()
