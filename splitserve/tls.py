"""TLS files, roles in certificates, and gRPC credentials made of them.

A part's certificate names its role twice: as the URI `spiffe://splitserve/ROLE`, which says who calls, and as the DNS
name `ROLE.splitserve.internal`, under which callers inside the cluster verify whom they have reached. So parts may
move between addresses without new certificates. Clients outside verify the host name of the address they call.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import grpc

from splitserve.errors import ConfigError
from splitserve.security_settings import TlsConfig

Role = Literal["coordinator", "prefill", "decode", "autoscaler", "admin", "client"]
ROLES: tuple[Role, ...] = get_args(Role)
URI_PREFIX = "spiffe://splitserve/"
AUTHORITY_FILE = "ca.pem"
SAN_PROPERTY = "x509_subject_alternative_name"

CallContext = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. A server needs all three; a client may leave out its certificate, and the authority for the
    system's own ones."""

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def role_uri(role: Role) -> str:
    """How a certificate names the role of its holder."""
    return f"{URI_PREFIX}{role}"


def role_name(role: Role) -> str:
    """The DNS name under which a part of this role is verified inside the cluster."""
    return f"{role}.splitserve.internal"


def files_in(directory: Path, role: Role) -> TlsFiles:
    """Where `splitserve certs` puts the files of a role."""
    return TlsFiles(directory / AUTHORITY_FILE, directory / f"{role}.pem", directory / f"{role}-key.pem")


def part_files(config: TlsConfig, role: Role) -> TlsFiles:
    """The files of a part, checked. Raises ConfigError naming the one that is missing or wrong."""
    found = files_in(config.directory, role) if config.directory else TlsFiles()
    files = TlsFiles(
        config.authority or found.authority, config.certificate or found.certificate, config.key or found.key
    )
    for field in fields(files):
        if getattr(files, field.name) is None:
            raise ConfigError(
                f"tls.{field.name}: missing, and so is tls.directory", field=f"tls.{field.name}"
            )
    check_files(files)
    return files


def client_files(path: Path) -> TlsFiles:
    """What a client uses of a folder as `splitserve certs` writes it, or of the authority's file alone.

    Of a folder it takes the certificate of `admin`, else of `client`, else of any role whose key it may read, else
    none. Raises ConfigError.
    """
    if not path.is_dir():
        files = TlsFiles(authority=path)
    else:
        files = TlsFiles(authority=path / AUTHORITY_FILE)
        for role in ("admin", "client", *ROLES):
            found = files_in(path, role)
            if all(pem is not None and os.access(pem, os.R_OK) for pem in (found.certificate, found.key)):
                files = found
                break
    check_files(files)
    return files


def check_files(files: TlsFiles) -> None:
    """Raises ConfigError for a file that cannot be read, is no PEM, does not fit the other, or has expired."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if files.authority is not None:
        with _naming("authority", files.authority):
            context.load_verify_locations(cafile=files.authority)
    if files.certificate is None or files.key is None:
        return
    _read("key", files.key)
    with _naming("certificate", files.certificate):
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")  # asks nobody
    ends = expiry(files.certificate)
    if ends <= datetime.now(UTC):
        message = f"tls.certificate: {files.certificate} expired on {ends:%Y-%m-%d %H:%M} UTC"
        raise ConfigError(message, field="tls.certificate")


def expiry(certificate: Path) -> datetime:
    """When a certificate ends."""
    from cryptography.x509 import load_pem_x509_certificates

    return load_pem_x509_certificates(certificate.read_bytes())[0].not_valid_after_utc


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a caller, from the files as they are now."""
    return grpc.ssl_channel_credentials(
        root_certificates=_read("authority", files.authority) if files.authority else None,
        private_key=_read("key", files.key) if files.key else None,
        certificate_chain=_read("certificate", files.certificate) if files.certificate else None,
    )


def server_credentials(files: TlsFiles, *, mutual: bool) -> grpc.ServerCredentials:
    """Credentials of a server. `mutual`: who calls must show a certificate of the authority.

    Files that change are read again at the next connection, so that certificates can be renewed in place.
    """
    renewed = _RenewedFiles(files)
    fetch: Any = (
        renewed  # None, which the types do not know, is documented: it keeps the present configuration
    )
    return grpc.dynamic_ssl_server_credentials(renewed.read(), fetch, require_client_authentication=mutual)


def peer_roles(context: CallContext) -> frozenset[str]:
    """The roles in the certificate that the caller has shown; none without mutual TLS."""
    names = [bytes(name).decode("utf-8", "replace") for name in context.auth_context().get(SAN_PROPERTY, ())]
    return frozenset(name.removeprefix(URI_PREFIX) for name in names if name.startswith(URI_PREFIX))


class _RenewedFiles:
    """Called by gRPC at each connection, on a thread of its own; None keeps what it has."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = self._stamp()

    def read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        pair = (_read("key", files.key), _read("certificate", files.certificate))
        return grpc.ssl_server_certificate_configuration([pair], _read("authority", files.authority))

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return None
            check_files(self._files)
            self._seen = stamp
            return self.read()
        except (OSError, ConfigError):
            # Half of a renewal, perhaps: the certificate is new and the key is not. The next connection looks again.
            return None

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        paths = (self._files.authority, self._files.certificate, self._files.key)
        stats = [path.stat() for path in paths if path is not None]
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)


@contextmanager
def _naming(field: str, path: Path) -> Iterator[None]:
    """Turns what is wrong with a file into a ConfigError that names the setting."""
    try:
        yield
    except ssl.SSLError as error:
        why = (error.reason or "is no PEM file").lower().replace("_", " ")
        raise ConfigError(f"tls.{field}: {path}: {why}", field=f"tls.{field}") from None
    except OSError as error:
        why = f"cannot read {path}: {error.strerror}"
        raise ConfigError(f"tls.{field}: {why}", field=f"tls.{field}") from None


def _read(field: str, path: Path | None) -> bytes:
    assert path is not None, field
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"tls.{field}: cannot read {path}: {error.strerror}"
        raise ConfigError(message, field=f"tls.{field}") from None
