"""Settings of TLS, of the cluster token and of a worker's limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from splitserve.config.base import Option, Settings


class TlsConfig(Settings):
    """Mutual TLS between all components, and TLS towards clients. Files are PEM; see docs/guides/security.md."""

    directory: Annotated[Path | None, Option(flag="tls", metavar="DIR", tier="basic")] = None
    """Folder written by `splitserve certs`, for mutual TLS. It contains `ca.pem`, and `ROLE.pem` with `ROLE-key.pem`
    for the component's role (coordinator, prefill, decode, autoscaler, admin, client)."""
    certificate: Annotated[Path | None, Option(flag="tls-certificate")] = None
    """The component's certificate, followed by intermediate ones. Default: from `directory`."""
    key: Annotated[Path | None, Option(flag="tls-key")] = None
    """Private key of the certificate. Default: from `directory`."""
    authority: Annotated[Path | None, Option(flag="tls-authority")] = None
    """Certificates of the authority that signed all components' certificates. Default: from `directory`."""


class CeilingConfig(Settings):
    """A worker's own limits on requests from coordinators."""

    max_output_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Maximum number of output tokens of a request. Default: limited by the context only."""
    require_cache_salt: bool = False
    """Refuse requests without a cache salt: such requests would share their prompts' KV across tenants."""


class SecuritySettings(Settings):
    """Common security settings of coordinator, workers and autoscaler."""

    tls: TlsConfig | None = None
    """Section `tls`. Default: no encryption."""
    cluster_token_file: Path | None = None
    """File with the secret shared by all components of a cluster. Calls between them without it are refused. Default:
    the value of SPLITSERVE_CLUSTER_TOKEN, else none."""
