"""Chains of certificates, sound and broken: an authority, an intermediate certificate, and a worker's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from splitserve.security.certificates import Issued
from splitserve.security.tls import AUTHORITY_FILE, Role, files_in, role_name, role_uri

Days = tuple[float, float]
"""From when and until when a certificate is valid, in days from now."""
VALID: Days = (-1, 10)


def write_chain(
    folder: Path,
    *,
    root: Days = VALID,
    inner: Days = VALID,
    leaf: Days = VALID,
    sent: Sequence[str] = ("leaf", "inner"),
    trusted: str = "root",
    key: str = "leaf",
    renewed: bool = False,
    role: Role = "worker",
) -> Path:
    """Writes a role's files, and `inner.pem`; returns the folder.

    `sent`: the certificates in the role's file; `trusted`: that in the authority's file, "other" and "namesake" have
    signed none of these; `key`: whose key it is; `renewed`: another intermediate certificate of the same key is valid.
    """
    top = _issue("root", None, root)
    middle = _issue("inner", top, inner)
    made = {
        "root": top,
        "inner": middle,
        "leaf": _issue(role, middle, leaf, role),
        "other": _issue("other", None, VALID),
        "namesake": _issue("root", None, VALID),
    }
    files = files_in(folder, role)
    assert files.certificate is not None
    assert files.key is not None
    Issued(made["leaf"].certificate, made[key].key).write(files.certificate, files.key)
    certificates = [made[name].certificate for name in sent]
    if renewed:
        certificates.append(_issue("inner", top, VALID, key=middle.key).certificate)
    files.certificate.write_bytes(b"".join(one.public_bytes(Encoding.PEM) for one in certificates))
    (folder / AUTHORITY_FILE).write_bytes(made[trusted].certificate.public_bytes(Encoding.PEM))
    (folder / "inner.pem").write_bytes(middle.certificate.public_bytes(Encoding.PEM))
    return folder


def _issue(
    name: str,
    signer: Issued | None,
    days: Days,
    role: Role | None = None,
    key: ec.EllipticCurvePrivateKey | None = None,
) -> Issued:
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    begins, ends = (datetime.now(UTC) + timedelta(days=at) for at in days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer.certificate.subject if signer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=role is None, path_length=None), critical=True)
    )
    if role is not None:
        names = [x509.UniformResourceIdentifier(role_uri(role)), x509.DNSName(role_name(role))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Issued(builder.sign(signer.key if signer else key, hashes.SHA256()), key)
