"""Credentials of a cluster component: TLS files and the cluster token."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from splitserve.config.security import TlsConfig
from splitserve.errors import ConfigError
from splitserve.logs import log_event
from splitserve.rpc.channel import DEFAULT_MAX_MESSAGE_BYTES, make_channel
from splitserve.runtime.bounded_file import read_named_file
from splitserve.security.authorizer import TOKEN_KEY, RpcAuthorizer, Rules
from splitserve.security.tls import Role, ServerTls, TlsFiles, part_files

TOKEN_VARIABLE = "SPLITSERVE_CLUSTER_TOKEN"
MIN_TOKEN_CHARACTERS, MAX_TOKEN_CHARACTERS = 16, 1024
"""A token travels with each call; gRPC refuses calls with much more than 8 KiB of metadata."""
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ClusterCredentials:
    """TLS files and cluster token of one component; the default has neither."""

    tls: TlsFiles | None = None
    token: str | None = field(default=None, repr=False)
    server_tls: ServerTls | None = None
    """TLS of the component's own servers. New channels take what is in force there."""

    @property
    def metadata(self) -> Metadata:
        """Metadata for every call to another component."""
        return ((TOKEN_KEY, self.token),) if self.token is not None else ()

    def channel(
        self,
        address: str,
        peer: Role,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        read_ahead_bytes: int | None = None,
    ) -> grpc.aio.Channel:
        """A channel to the component of role `peer` at "host:port". With TLS the server must prove that role."""
        return make_channel(
            address,
            max_message_bytes=max_message_bytes,
            tls=self.tls if self.server_tls is None else self.server_tls.pems,
            peer=peer,
            read_ahead_bytes=read_ahead_bytes,
        )

    def authorizer(self, rules: Rules) -> RpcAuthorizer:
        """The authorizer of calls to this component."""
        return RpcAuthorizer(rules, mutual=self.tls is not None, token=self.token)


UNSECURED = ClusterCredentials()


def cluster_credentials(role: Role, tls: TlsConfig | None, token_file: Path | None) -> ClusterCredentials:
    """The credentials in a component's settings. Without a token file, the token is SPLITSERVE_CLUSTER_TOKEN, if set.

    Raises ConfigError naming the setting.
    """
    files, token = part_files(tls, role) if tls else None, read_token(token_file)
    return ClusterCredentials(files, token, ServerTls(files) if files else None)


def read_token(path: Path | None) -> str | None:
    """The cluster token, or None without one. Raises ConfigError naming `cluster_token_file`."""
    if path is not None:
        return read_token_file(path, "cluster_token_file")
    token = os.environ.get(TOKEN_VARIABLE, "")
    return _checked_token(token, TOKEN_VARIABLE, "cluster_token_file") if token else None


def read_token_file(path: Path, setting: str) -> str:
    """The secret in the file that a setting names. Raises ConfigError naming the setting."""
    try:
        token = read_named_file(path, setting).decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    return _checked_token(token, str(path), setting)


def _checked_token(token: str, where: str, setting: str) -> str:
    # The message must not contain the token.
    fits = MIN_TOKEN_CHARACTERS <= len(token) <= MAX_TOKEN_CHARACTERS
    if not fits or not (token.isascii() and token.isprintable()):
        bounds = f"{MIN_TOKEN_CHARACTERS} to {MAX_TOKEN_CHARACTERS}"
        message = f"{setting}: {where} must hold {bounds} printable ASCII characters"
        raise ConfigError(message, field=setting)
    return token


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def warn_if_open(part: str, host: str, closed: bool) -> None:
    """Logs a warning if a component listens beyond loopback and accepts unauthenticated calls."""
    if not closed and not is_loopback(host):
        advice = "anybody who reaches it can use it; see docs/guides/security.md"
        log_event("security.open", level=logging.WARNING, listens_as=part, host=host, advice=advice)


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
