"""TLS files, roles in certificates, gRPC credentials, and a server's certificates, which are renewed with their files.

A component's certificate contains its role twice: as the URI `spiffe://splitserve/ROLE`, or
`spiffe://splitserve/ROLE/WORKER_ID` for that worker alone, which identifies it as a caller; and as the DNS name
`ROLE.splitserve.internal`, which callers inside the cluster verify. Components can thus change addresses without new
certificates. External clients verify the host name that they call.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import grpc

from splitserve.config.security import TlsConfig
from splitserve.errors import ConfigError
from splitserve.runtime.bounded_file import read_named_file, read_small_file
from splitserve.runtime.reload import ReloadedFiles

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

Role = Literal["coordinator", "worker", "autoscaler", "admin", "client"]
ROLES: tuple[Role, ...] = get_args(Role)
URI_PREFIX = "spiffe://splitserve/"
AUTHORITY_FILE = "ca.pem"
SAN_PROPERTY = "x509_subject_alternative_name"
CERTIFICATE_PROPERTY = "x509_pem_cert"

CallContext = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. A server needs all three; a client may omit certificate and key, and the authority to use the
    system's authorities."""

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class TlsPems:
    """Content of `TlsFiles`."""

    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


def role_uri(role: Role, worker_id: str | None = None) -> str:
    """The URI for a role in a certificate; for one that belongs to a single worker, with its id."""
    return f"{URI_PREFIX}{role}" if worker_id is None else f"{URI_PREFIX}{role}/{worker_id}"


def role_name(role: Role) -> str:
    """The DNS name that a component of this role proves inside the cluster."""
    return f"{role}.splitserve.internal"


def files_in(directory: Path, role: Role) -> TlsFiles:
    """Paths of a role's files as written by `splitserve certs`."""
    return TlsFiles(directory / AUTHORITY_FILE, directory / f"{role}.pem", directory / f"{role}-key.pem")


def part_files(config: TlsConfig, role: Role) -> TlsFiles:
    """A component's files, checked. Raises ConfigError naming the missing or invalid one."""
    defaults = files_in(config.directory, role) if config.directory else TlsFiles()
    files = TlsFiles(
        config.authority or defaults.authority,
        config.certificate or defaults.certificate,
        config.key or defaults.key,
    )
    for file in fields(files):
        if getattr(files, file.name) is None:
            raise ConfigError(f"tls.{file.name}: missing, and so is tls.directory", field=f"tls.{file.name}")
    check_files(files)
    return files


def client_files(path: Path) -> TlsFiles:
    """A client's files: `path` is a folder written by `splitserve certs`, or the authority's file.

    From a folder it takes the certificate of `admin`, else of `client`, else of any role with a readable key, else
    none. Raises ConfigError.
    """
    if not path.is_dir():
        files = TlsFiles(authority=path)
    else:
        files = TlsFiles(authority=path / AUTHORITY_FILE)
        for role in ("admin", "client", *ROLES):
            role_files = files_in(path, role)
            if all(
                pem is not None and os.access(pem, os.R_OK)
                for pem in (role_files.certificate, role_files.key)
            ):
                files = role_files
                break
    check_files(files)
    return files


def check_files(files: TlsFiles) -> None:
    """Raises ConfigError for files that peers would refuse.

    That is an unreadable or invalid file, the key of another certificate, and a chain with a certificate that is
    missing or not valid now.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if files.authority is not None:
        _read("authority", files.authority)
        with _config_errors("authority", files.authority):
            context.load_verify_locations(cafile=files.authority)
    if files.certificate is None or files.key is None:
        return
    _read("certificate", files.certificate)
    _read("key", files.key)
    with _config_errors("certificate", files.certificate):
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")  # no password prompt
    with _config_errors("certificate", files.certificate):
        _check_chain(files.certificate, files.authority)


def _check_chain(path: Path, authority: Path | None) -> None:
    """Raises ValueError naming the first certificate, from the component's own on, that peers would refuse."""
    # Imported here: clients without TLS need none of it.
    from cryptography.x509 import load_pem_x509_certificates

    own, *others = load_pem_x509_certificates(read_small_file(path))
    known = load_pem_x509_certificates(read_small_file(authority)) if authority else []
    now = datetime.now(UTC)
    for _ in range(len(others) + len(known) + 1):
        subject = own.subject.rfc4514_string()
        begins, ends = own.not_valid_before_utc, own.not_valid_after_utc
        if ends <= now:
            raise ValueError(f"{subject} expired on {ends:%Y-%m-%d %H:%M} UTC")
        if begins > now:
            raise ValueError(f"{subject} is not valid before {begins:%Y-%m-%d %H:%M} UTC")
        if own in known:
            return
        signers = [other for other in (*known, *others) if other != own and _signed(own, other)]
        if authority is None and not signers:  # the system's authorities cannot be searched here
            return
        if own.issuer == own.subject:
            raise ValueError(f"{subject} is signed by itself, and is not in {authority}")
        if not signers:
            missing = f"the certificate of {own.issuer.rfc4514_string()}, which signed {subject},"
            raise ValueError(f"{missing} is neither in this file nor in {authority}")
        # A renewed signer has several certificates: follow the one that is valid longest.
        own = max(signers, key=lambda signer: signer.not_valid_after_utc)
    raise ValueError(f"its certificates are signed by each other, and not by {authority}")


def _signed(certificate: Certificate, signer: Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    with suppress(ValueError, TypeError, InvalidSignature):
        certificate.verify_directly_issued_by(signer)
        return True
    return False


def read_pems(files: TlsFiles) -> TlsPems:
    """The content of the files now. Raises ConfigError for one that cannot be read."""
    return TlsPems(
        authority=_read("authority", files.authority) if files.authority else None,
        certificate=_read("certificate", files.certificate) if files.certificate else None,
        key=_read("key", files.key) if files.key else None,
    )


def channel_credentials(pems: TlsPems) -> grpc.ChannelCredentials:
    """Client credentials."""
    return grpc.ssl_channel_credentials(
        root_certificates=pems.authority, private_key=pems.key, certificate_chain=pems.certificate
    )


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The caller according to the certificate of its connection; all fields are empty without one."""

    roles: frozenset[str] = frozenset()
    worker_ids: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By role: the only worker ids that the certificate may register. A role that is missing here may register any."""
    fingerprint: str = ""
    """SHA-256 of the certificate, hexadecimal."""

    def may_be(self, role: str, worker_id: str) -> bool:
        """Whether the certificate is one of this worker of this role."""
        return role in self.roles and worker_id in self.worker_ids.get(role, {worker_id})


def peer_identity(context: CallContext) -> PeerIdentity:
    """The caller's identity under mutual TLS."""
    presented = context.auth_context()
    names = [bytes(name).decode("utf-8", "replace") for name in presented.get(SAN_PROPERTY, ())]
    roles, bound = set(), defaultdict(set)
    for name in names:
        if name.startswith(URI_PREFIX):
            role, slash, worker_id = name.removeprefix(URI_PREFIX).partition("/")
            roles.add(role)
            if slash:
                bound[role].add(worker_id)
    certificate = b"".join(bytes(pem) for pem in presented.get(CERTIFICATE_PROPERTY, ()))
    return PeerIdentity(
        frozenset(roles),
        {role: frozenset(ids) for role, ids in bound.items()},
        hashlib.sha256(certificate).hexdigest() if certificate else "",
    )


@contextmanager
def _config_errors(field: str, path: Path) -> Iterator[None]:
    """Converts errors of a file to a ConfigError that names the setting."""
    try:
        yield
    except ssl.SSLError as error:
        why = (error.reason or "not a PEM file").lower().replace("_", " ")
        raise ConfigError(f"tls.{field}: {path}: {why}", field=f"tls.{field}") from None
    except OSError as error:
        why = f"cannot read {path}: {error.strerror}"
        raise ConfigError(f"tls.{field}: {why}", field=f"tls.{field}") from None
    except ValueError as error:
        raise ConfigError(f"tls.{field}: {path}: {error}", field=f"tls.{field}") from None


def _read(field: str, path: Path | None) -> bytes:
    assert path is not None, field
    # A pipe is refused: OpenSSL opens the file again, and would wait for another writer.
    return read_named_file(path, f"tls.{field}", may_be_pipe=False)


@dataclass(frozen=True, slots=True)
class _InForce:
    """One state of the files, checked as a whole."""

    pems: TlsPems
    contexts: dict[bool, ssl.SSLContext]
    """Server contexts: under True one that requires a client's certificate, under False one that asks for none."""


class ServerTls:
    """TLS of all servers of a component. New connections use the renewed files; open ones stay as they are.

    Raises ConfigError for files that are unusable at the start; later, unusable files change nothing. The owner of this
    object adds `file` to a `FileWatcher`.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        paths = [path for path in (files.authority, files.certificate, files.key) if path is not None]
        self.file: ReloadedFiles[_InForce] = ReloadedFiles("tls", lambda: paths, self._load, self._adopt)
        self.file.start()

    @property
    def pems(self) -> TlsPems:
        """The files' content that new connections use."""
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
        """A context for servers without gRPC. Each connection uses the files in force when it begins."""
        context = _context(self.files, mutual)
        self.renew(context, mutual=mutual)
        return context

    def renew(self, context: ssl.SSLContext, *, mutual: bool) -> None:
        """Makes each new connection of a server with this context use the files in force."""

        def choose(connection: ssl.SSLObject, name: str | None, base: ssl.SSLContext) -> None:
            # Called for each ClientHello, with or without a server name; the documented place to change the context.
            connection.context = self._in_force.contexts[mutual]

        context.sni_callback = choose

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
