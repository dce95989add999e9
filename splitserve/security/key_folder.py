"""A folder with the secrets of one installation, made once: what `splitserve keys init` writes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from splitserve.errors import ConfigError
from splitserve.runtime.bounded_file import read_named_text, read_small_file
from splitserve.security.api_keys import key_hash, new_key

CLUSTER_TOKEN = "cluster_token"
API_KEY = "api_key"
TENANTS = "tenants.yaml"
CACHE_SALT = "cache_salt"
GRAFANA_PASSWORD = "grafana_password"
_MODE = 0o440
"""Readable by the owner and by the group that containers of other users join."""


def make_key_folder(folder: Path, *, token: str = "", key: str = "") -> list[str]:
    """Writes what is missing: cluster token, an admin's API key with its file of tenants, cache salt, Grafana password.

    A token or key that is given takes the place of the one in the folder. Returns the names of the files written.
    Raises ConfigError when the folder cannot be written.
    """
    written: list[str] = []

    def put(name: str, content: bytes, *, replace: bool = False) -> None:
        path = folder / name
        if path.exists() and (not replace or read_small_file(path, pipes="none") == content):
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
        # The operator may add tenants to the file: it is made anew only with another key.
        if API_KEY in written or not (folder / TENANTS).exists():
            kept = read_named_text(folder / API_KEY, "folder", pipes="none")
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
