"""What one part of a cluster shows to the others, and what it asks of them."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from splitserve.call_guard import TOKEN_KEY, CallGuard, Rules
from splitserve.errors import ConfigError
from splitserve.logs import log_event
from splitserve.rpc import DEFAULT_MAX_MESSAGE_BYTES, make_channel
from splitserve.security_settings import TlsConfig
from splitserve.tls import Role, TlsFiles, part_files

TOKEN_VARIABLE = "SPLITSERVE_CLUSTER_TOKEN"
LEAST_TOKEN_CHARACTERS = 16
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PartSecurity:
    """TLS files and cluster token of one part; the default has neither."""

    tls: TlsFiles | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def metadata(self) -> Metadata:
        """Goes with every call to another part."""
        return ((TOKEN_KEY, self.token),) if self.token is not None else ()

    def channel(
        self,
        address: str,
        peer: Role,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        read_ahead_bytes: int | None = None,
    ) -> grpc.aio.Channel:
        """A channel to the part of that role at "host:port". With TLS the other side must prove its role."""
        return make_channel(
            address,
            max_message_bytes=max_message_bytes,
            tls=self.tls,
            peer=peer,
            read_ahead_bytes=read_ahead_bytes,
        )

    def guard(self, rules: Rules) -> CallGuard:
        """What to ask of callers of this part."""
        return CallGuard(rules, mutual=self.tls is not None, token=self.token)


UNSECURED = PartSecurity()


def part_security(role: Role, tls: TlsConfig | None, token_file: Path | None) -> PartSecurity:
    """From the settings of a part. Without a token file, SPLITSERVE_CLUSTER_TOKEN may hold the token.

    Raises ConfigError naming the setting.
    """
    return PartSecurity(part_files(tls, role) if tls else None, read_token(token_file))


def read_token(path: Path | None) -> str | None:
    """The cluster token, if there is one. Raises ConfigError naming `cluster_token_file`."""
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        where = TOKEN_VARIABLE
        if not token:
            return None
    else:
        where = str(path)
        try:
            token = path.read_text(encoding="ascii").strip()
        except OSError as error:
            message = f"cluster_token_file: cannot read {path}: {error.strerror}"
            raise ConfigError(message, field="cluster_token_file") from None
        except UnicodeDecodeError:
            token = ""
    # What it holds is told to nobody.
    if len(token) < LEAST_TOKEN_CHARACTERS or not (token.isascii() and token.isprintable()):
        message = f"cluster_token_file: {where} must hold at least {LEAST_TOKEN_CHARACTERS} printable ASCII characters"
        raise ConfigError(message, field="cluster_token_file")
    return token


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def warn_if_open(part: str, host: str, closed: bool) -> None:
    """One loud line where a part listens beyond this machine and takes calls from anybody."""
    if not closed and not is_loopback(host):
        advice = "anybody who reaches it can use it; see docs/security.md"
        log_event("security.open", level=logging.WARNING, listens_as=part, host=host, advice=advice)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
