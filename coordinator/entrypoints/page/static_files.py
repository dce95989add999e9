"""The page's files: read once, served from memory under a strict content security policy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from coordinator.entrypoints.http.errors import Headers
from splitserve.errors import NotFoundError

INDEX = "index.html"
TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
"""Content types by suffix; files of other kinds are not served."""
SECURITY_HEADERS: Headers = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
"""On every response of the page, its data included."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file with what HTTP says about it."""

    content: bytes
    content_type: bytes
    etag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """The page's files by name."""
    found = {}
    for entry in files(__package__).joinpath("static").iterdir():
        kind = TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None:
            content = entry.read_bytes()
            found[entry.name] = StaticFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


def static_file(name: str) -> StaticFile:
    """The file of that name. Raises NotFoundError."""
    found = static_files().get(name)
    if found is None:
        raise NotFoundError("there is no such file of the page", reason="NOT_FOUND")
    return found
