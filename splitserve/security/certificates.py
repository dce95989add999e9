"""A development authority and one certificate per role, as PEM files in a folder: EC P-256, signed with SHA-256.

In production use your own authority (cert-manager, SPIRE, Vault) to issue certificates with the same names; see
docs/guides/security.md.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from splitserve.errors import ConfigError, FailedPreconditionError
from splitserve.runtime.bounded_file import read_small_file
from splitserve.security.tls import AUTHORITY_FILE, ROLES, Role, TlsFiles, files_in, role_name, role_uri

AUTHORITY_KEY_FILE = "ca-key.pem"
AUTHORITY_DAYS = 3650
WORKER: Role = "worker"
CLIENT_ROLES: frozenset[Role] = frozenset({"admin", "client"})
"""Roles that never act as a server."""
BACKDATED = timedelta(minutes=5)
"""Tolerance for clock differences between machines."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, certificate: Path, key: Path) -> None:
        """Writes PEM files; the key file is readable by its owner only."""
        certificate.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        text = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        key.unlink(missing_ok=True)
        descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)


def write_certificates(
    directory: Path,
    hosts: Sequence[str],
    days: int,
    *,
    force: bool = False,
    now: datetime | None = None,
    workers: Sequence[str] = (),
) -> list[Path]:
    """Creates the certificates of all roles for these hosts, and the folder's authority unless it exists.

    Each worker id in `workers` also gets a certificate of its own, worker-ID.pem, which can register no other id.

    Returns the certificate files. Without `force`, raises FailedPreconditionError (FILE_EXISTS) if there are
    certificates already. With `force` it replaces them but keeps the authority, so that components with old and new
    certificates trust each other. Raises ConfigError for an unreadable authority and for a path that is no folder.
    """
    now = now or datetime.now(UTC)
    named = [(role, None, files_in(directory, role)) for role in ROLES]
    own = [(WORKER, worker_id, worker_files(directory, worker_id)) for worker_id in workers]
    wanted: list[tuple[Role, str | None, TlsFiles]] = [*named, *own]
    present = [
        pem for _, _, files in wanted for pem in (files.certificate, files.key) if pem and pem.exists()
    ]
    if present and not force:
        message = f"{present[0]} exists already; --force replaces the certificates and keeps the authority"
        raise FailedPreconditionError(message, reason="FILE_EXISTS")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        authority = _authority(directory, now)
        for role, worker_id, files in wanted:
            assert files.certificate is not None
            assert files.key is not None
            # Only the coordinator is addressed by host name, so only its certificate names hosts.
            names = hosts if role == "coordinator" else ()
            issue(authority, role, names, now, days, worker_id).write(files.certificate, files.key)
    except OSError as error:
        raise ConfigError(
            f"directory: cannot write {directory}: {error.strerror}", field="directory"
        ) from None
    return [directory / AUTHORITY_FILE, *(files.certificate for _, _, files in wanted if files.certificate)]


def worker_files(directory: Path, worker_id: str) -> TlsFiles:
    """Paths of the files of one worker's own certificate."""
    name = f"worker-{worker_id}"
    return TlsFiles(directory / AUTHORITY_FILE, directory / f"{name}.pem", directory / f"{name}-key.pem")


def make_authority(now: datetime) -> Issued:
    """A new authority that may sign certificates of components but not of other authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("splitserve development authority")
    builder = _builder(name, name, key, now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return Issued(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: Issued,
    role: Role,
    hosts: Sequence[str],
    now: datetime,
    days: int,
    worker_id: str | None = None,
) -> Issued:
    """Issues a role's certificate with its URI, its name inside the cluster, and the host names for clients.

    With `worker_id` only this worker can use it.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(role_uri(role, worker_id)),
        x509.DNSName(role_name(role)),
        *(_host(host) for host in hosts),
    ]
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role not in CLIENT_ROLES:
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    builder = _builder(_name(role), authority.certificate.subject, key, now, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(issuer, critical=False)
    return Issued(builder.sign(authority.key, hashes.SHA256()), key)


def _authority(directory: Path, now: datetime) -> Issued:
    certificate, key = directory / AUTHORITY_FILE, directory / AUTHORITY_KEY_FILE
    if not certificate.exists() and not key.exists():
        authority = make_authority(now)
        authority.write(certificate, key)
        return authority
    try:
        loaded = serialization.load_pem_private_key(read_small_file(key), password=None)
        known = x509.load_pem_x509_certificate(read_small_file(certificate))
    except (OSError, ValueError, TypeError) as error:
        message = f"cannot use the authority in {directory}: {error}"
        raise ConfigError(message, field="directory") from None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != known.public_key():
        raise ConfigError(f"{key} is not the key of {certificate}", field="directory")
    return Issued(known, loaded)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"host must be a name or an address, not {host!r}: {error}", field="host") from None


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
