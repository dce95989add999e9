"""A development authority and one certificate a role, as PEM files in a folder: EC P-256, signed with SHA-256.

For production let your own authority (cert-manager, SPIRE, Vault) issue certificates with the same names; see
docs/security.md.
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
from splitserve.tls import AUTHORITY_FILE, ROLES, Role, files_in, role_name, role_uri

AUTHORITY_KEY_FILE = "ca-key.pem"
AUTHORITY_DAYS = 3650
ASKING_ROLES: frozenset[Role] = frozenset({"admin", "client"})
"""These never answer."""
BACKDATED = timedelta(minutes=5)
"""Clocks of two machines differ a little."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, certificate: Path, key: Path) -> None:
        """As PEM files; the key's can be read by its owner only."""
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
) -> list[Path]:
    """Makes the folder's authority, unless it is there, and all roles' certificates for these hosts.

    Returns the certificates' files. Raises FailedPreconditionError (FILE_EXISTS) rather than replace a certificate,
    unless `force` is set; the authority is kept even then, so that parts with old and new certificates still trust
    each other. Raises ConfigError for an authority that cannot be read.
    """
    now = now or datetime.now(UTC)
    roles = [files_in(directory, role) for role in ROLES]
    present = [pem for files in roles for pem in (files.certificate, files.key) if pem and pem.exists()]
    if present and not force:
        message = f"{present[0]} exists already; --force replaces the certificates and keeps the authority"
        raise FailedPreconditionError(message, reason="FILE_EXISTS")
    directory.mkdir(parents=True, exist_ok=True)
    authority = _authority(directory, now)
    for role, files in zip(ROLES, roles, strict=True):
        assert files.certificate is not None
        assert files.key is not None
        # Only the coordinator is addressed by a host's name, so only it may prove one.
        names = hosts if role == "coordinator" else ()
        issue(authority, role, names, now, days).write(files.certificate, files.key)
    return [directory / AUTHORITY_FILE, *(files.certificate for files in roles if files.certificate)]


def make_authority(now: datetime) -> Issued:
    """An authority that signs parts' certificates and nothing else."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("splitserve development authority")
    builder = _builder(name, name, key, now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return Issued(builder.sign(key, hashes.SHA256()), key)


def issue(authority: Issued, role: Role, hosts: Sequence[str], now: datetime, days: int) -> Issued:
    """A certificate of a role: its URI, its name inside the cluster, and the hosts at which clients reach it."""
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(role_uri(role)),
        x509.DNSName(role_name(role)),
        *(_host(host) for host in hosts),
    ]
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role not in ASKING_ROLES:
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
        made = make_authority(now)
        made.write(certificate, key)
        return made
    try:
        loaded = serialization.load_pem_private_key(key.read_bytes(), password=None)
        known = x509.load_pem_x509_certificate(certificate.read_bytes())
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
