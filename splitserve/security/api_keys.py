"""API keys: format, storage and transmission; and the folder of secrets that `splitserve keys init` writes.

A key has 256 random bits; the tenants file stores only its SHA-256. Slow password hashes (bcrypt, argon2) protect
guessable, human-chosen secrets. 256 random bits cannot be guessed, so a fast hash is equally safe and costs a
microsecond per request instead of a tenth of a second.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from splitserve.errors import ConfigError, InvalidArgumentError
from splitserve.runtime.bounded_file import read_named_text, read_small_file

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


CLUSTER_TOKEN = "cluster_token"
API_KEY = "api_key"
TENANTS = "tenants.yaml"
CACHE_SALT = "cache_salt"
GRAFANA_PASSWORD = "grafana_password"
_MODE = 0o440
"""Readable by the owner and by the group that containers of other users join."""


def make_key_folder(folder: Path, *, token: str = "", key: str = "") -> list[str]:
    """Writes what is missing: cluster token, an admin's API key with its file of tenants, cache salt, Grafana password.

    `token` and `key`, if not empty, replace those in the folder. Returns the names of the files written. Raises
    ConfigError when the folder cannot be written.
    """
    written: list[str] = []

    def put(name: str, content: bytes, *, replace: bool = False) -> None:
        path = folder / name
        if path.exists() and (not replace or read_small_file(path) == content):
            return
        fresh = folder / f".{name}.new"
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE), "wb") as file:
            file.write(content)
        fresh.replace(path)
        written.append(name)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        put(CLUSTER_TOKEN, (token or secrets.token_urlsafe(32)).encode(), replace=bool(token))
        put(API_KEY, (key or new_key()).encode(), replace=bool(key))
        put(CACHE_SALT, secrets.token_bytes(32))
        put(GRAFANA_PASSWORD, secrets.token_urlsafe(18).encode())
        # The operator may have added tenants to the file, so it is replaced only with another key.
        if API_KEY in written or not (folder / TENANTS).exists():
            kept = read_named_text(folder / API_KEY, "folder")
            put(TENANTS, _tenants(kept.strip()).encode(), replace=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write the keys: {error.strerror}", field="folder") from None
    return written


def _tenants(key: str) -> str:
    return (
        f"cache_salt_secret_file: {CACHE_SALT}\n"
        "tenants:\n"
        "  - name: operator\n"
        f'    key_hashes: ["{key_hash(key)}"]\n'
        "    admin: true\n"
    )
