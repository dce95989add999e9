"""Settings of TLS, of the cluster token, and of what a worker allows at most; sections of `splitserve.config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TlsConfig(_Section):
    """Mutual TLS between all parts, and TLS towards clients. Files are PEM; see docs/security.md."""

    directory: Path | None = None
    """Folder as `splitserve certs` writes it: `ca.pem`, and `ROLE.pem` with `ROLE-key.pem` for the part's role
    (coordinator, prefill, decode, autoscaler, admin, client)."""
    certificate: Path | None = None
    """The part's certificate, intermediate ones after it. Default: from `directory`."""
    key: Path | None = None
    """Its private key. Default: from `directory`."""
    authority: Path | None = None
    """Certificates of the authority that signed all parts' certificates. Default: from `directory`."""


class CeilingConfig(_Section):
    """What a worker accepts at most, whatever a coordinator asks for."""

    max_output_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Output tokens of one request. Default: what the context holds."""
    max_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 86_400.0
    """Deadline of one request."""
    max_cache_salt_bytes: Annotated[int, Field(ge=0, le=64)] = 64
    """Length of the salt that keeps tenants' prefix caches apart."""
    require_cache_salt: bool = False
    """Refuse requests without a salt: with tenants, one would share its prompts' KV with every other such request."""


class SecuredPart(_Section):
    """What coordinator, workers and autoscaler have in common."""

    tls: TlsConfig | None = None
    """Section `tls`. Default: no encryption."""
    cluster_token_file: Path | None = None
    """File with the secret that all parts of a cluster share; calls between parts that do not carry it are refused.
    Default: what SPLITSERVE_CLUSTER_TOKEN holds, else none."""
