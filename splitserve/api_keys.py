"""API keys: how they look, how they are stored, how they travel.

A key is 256 random bits. A file of tenants holds its SHA-256 only. Slow password hashes (bcrypt, argon2) protect
secrets that people choose, because those can be guessed; nobody guesses 256 random bits, so a fast hash gives nothing
away, and checking it costs a microsecond a request instead of a tenth of a second.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from splitserve.errors import ConfigError, InvalidArgumentError

KEY_PREFIX = "ss-"
"""Lets scanners for leaked secrets recognize a key."""
KEY_BYTES = 32
MAX_KEY_CHARACTERS = 512
"""Longer ones are refused unread."""
HASH_PREFIX = "sha256:"
API_KEY_VARIABLE = "SPLITSERVE_API_KEY"


def new_key() -> str:
    """A fresh key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_hash(key: str) -> str:
    """What a file of tenants says of a key: `sha256:` and 64 hexadecimal digits."""
    return HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()


def checked_key(key: str | None) -> str | None:
    """The key itself. Raises InvalidArgumentError for one that no header can carry; it is not repeated there."""
    if key is not None and not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isascii() and key.isprintable()):
        bound = f"1..{MAX_KEY_CHARACTERS} printable ASCII characters"
        raise InvalidArgumentError(f"api_key must be {bound}", field="api_key")
    return key


def read_key(path: Path | None) -> str | None:
    """The key in a file, if there is one. Raises ConfigError or InvalidArgumentError naming the setting."""
    if path is None:
        return None
    try:
        return checked_key(path.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        message = f"api_key_file: cannot read {path}: {type(error).__name__}"
        raise ConfigError(message, field="api_key_file") from None


def key_metadata(key: str | None) -> tuple[tuple[str, str], ...]:
    """The key as metadata of a gRPC call; empty for None."""
    return (("authorization", f"Bearer {key}"),) if key is not None else ()
