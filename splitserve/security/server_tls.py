"""A server's certificates as in force: read at the start, and again when the files change."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from splitserve.runtime.reload import ReloadedFiles
from splitserve.security.tls import TlsFiles, TlsPems, check_files, read_pems


@dataclass(frozen=True, slots=True)
class _InForce:
    """One state of the files, checked as a whole."""

    pems: TlsPems
    contexts: dict[bool, ssl.SSLContext]
    """Contexts of servers that require a client's certificate (True), and that ask for none."""


class ServerTls:
    """TLS of all servers of a component. New connections use the renewed files; open ones stay as they are.

    Raises ConfigError for files that are unusable at the start. Later such files change nothing. Who owns this adds
    `file` to a `FileWatcher`.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self.file: ReloadedFiles[_InForce] = ReloadedFiles("tls", self._paths, self._load, self._adopt)
        self.file.start()

    @property
    def pems(self) -> TlsPems:
        """What is in force."""
        return self._in_force.pems

    def grpc_credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """Credentials of a gRPC server. `mutual`: callers must present a certificate of the authority."""
        used = self.pems

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            # Called on gRPC's thread at each connection; None keeps the configuration.
            nonlocal used
            pems = self.pems
            if pems is used:
                return None
            used = pems
            return _grpc_configuration(pems)

        fetch: Any = renewed  # the type stubs do not know that None may be returned
        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(used), fetch, require_client_authentication=mutual
        )

    def ssl_context(self, *, mutual: bool) -> ssl.SSLContext:
        """A context for other servers, whose connections each use what is in force when they begin."""
        context = _context(self.files, mutual)
        self.renew(context, mutual=mutual)
        return context

    def renew(self, context: ssl.SSLContext, *, mutual: bool) -> None:
        """Makes each new connection of a server with this context use what is in force."""

        def choose(connection: ssl.SSLObject, name: str | None, base: ssl.SSLContext) -> None:
            # Called for each ClientHello, with or without a server name; the documented place to change the context.
            connection.context = self._in_force.contexts[mutual]

        context.sni_callback = choose

    def _paths(self) -> Sequence[Path]:
        files = (self.files.authority, self.files.certificate, self.files.key)
        return [path for path in files if path is not None]

    def _load(self) -> _InForce:
        check_files(self.files)
        contexts = {mutual: _context(self.files, mutual) for mutual in (False, True)}
        return _InForce(read_pems(self.files), contexts)

    def _adopt(self, loaded: _InForce) -> None:
        self._in_force = loaded


def _context(files: TlsFiles, mutual: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert files.certificate is not None  # a server's files are complete
    context.load_cert_chain(files.certificate, files.key)
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=files.authority)
    return context


def _grpc_configuration(pems: TlsPems) -> grpc.ServerCertificateConfiguration:
    assert pems.key is not None  # a server's files are complete
    assert pems.certificate is not None
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.authority)
