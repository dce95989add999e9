"""The tenants file: one YAML mapping, validated as a whole. See docs/guides/security.md for an example."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from coordinator.request.inference_request import Caller, PriorityClass, RequestTargets
from splitserve.config.base import ConfigModel
from splitserve.config.coordinator import OnLate
from splitserve.config.yaml_file import read_yaml_file
from splitserve.errors import ConfigError
from splitserve.runtime.bounded_file import read_named_file

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Rate = Annotated[float, Field(gt=0, le=1e9)]
LEAST_SECRET_BYTES = 16
SALT_BYTES = 16
SECRET_FIELD = "cache_salt_secret_file"
MAX_TENANTS_BYTES = 64 * 2**20
"""Room for the most tenants, each with the most key hashes."""


class TenantPolicy(ConfigModel):
    """One tenant. Limits that are not set do not apply."""

    name: Name
    """Name in logs and metrics; unique in the file."""
    key_hashes: Annotated[tuple[KeyHash, ...], Field(max_length=64)] = ()
    """Hashes of this tenant's API keys, as printed by `splitserve keys new`. Two during key rotation."""
    models: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ("*",)
    """Patterns of the model names, adapters included, that the tenant may use: `*`, `?` and `[...]`. Other models do
    not exist for it."""
    requests_per_second: Rate | None = None
    """Rate of new requests."""
    prompt_tokens_per_second: Rate | None = None
    """Rate of prompt tokens, including cached ones and the tokens of resumed answers."""
    output_tokens_per_second: Rate | None = None
    """Rate of output tokens. They are charged as they are sent, so an answer may overdraw this; the next request is
    refused until the debt is paid."""
    burst_seconds: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    """Each rate allows bursts of the amount that accrues in this many seconds, and of at least one request."""
    max_concurrent_requests: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Most requests in progress."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Most tokens of a prompt."""
    max_output_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Most output tokens of a request, and the default for requests that do not set a maximum."""
    priority_class: PriorityClass = "standard"
    """Order of service when requests have to wait."""
    weight: Annotated[float, Field(ge=0.01, le=1000)] = 1.0
    """Share of a saturated cluster, relative to the other tenants of the same class."""
    ttft_slo_s: Annotated[float, Field(ge=1e-6, le=86400)] | None = None
    """Target time to first token, in seconds; requests may ask for a longer one. Default: that of the settings (section
    `admission`)."""
    tpot_slo_s: Annotated[float, Field(ge=1e-6, le=3600)] | None = None
    """Target time per output token, in seconds; requests may ask for a longer one. Default: that of the settings."""
    on_late: OnLate | None = None
    """Whether requests that are predicted to miss their TTFT target are served late (`serve`) or refused on arrival
    (`refuse`). Default: as the settings say."""
    shared_cache_group: Name | None = None
    """Tenants of one group share cached KV of equal prompts, and can infer each other's prompts from timing.
    Default: no sharing."""
    admin: bool = False
    """May read workers and metrics, and change the scaling plan."""


class TenantsFile(ConfigModel):
    """The content of the tenants file."""

    tenants: Annotated[tuple[TenantPolicy, ...], Field(min_length=1, max_length=10_000)]
    """The tenants."""
    cache_salt_secret_file: Path | None = None
    """File with at least 16 random bytes, from which each tenant's cache salt is derived; relative to this file's
    folder. Coordinators that share workers should share it. Default: random at each start, which invalidates all
    earlier caches."""

    @model_validator(mode="after")
    def _unique(self) -> TenantsFile:
        if twice := _repeated(tenant.name for tenant in self.tenants):
            raise ValueError(f"name must be unique among tenants; given twice: {twice}")
        if _repeated(hashed for tenant in self.tenants for hashed in tenant.key_hashes):
            raise ValueError("key_hashes must be unique among tenants; one is given twice")
        return self

    @field_validator("tenants", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        if isinstance(value, dict):
            raise ValueError("must be a list, each entry with a `name`")
        return value


@dataclass(frozen=True, slots=True)
class TenantsConfig:
    """A tenants file with its secret."""

    file: TenantsFile
    secret: bytes = field(repr=False)
    secret_path: Path | None = None
    """Where the secret was read from."""

    def caller(self, policy: TenantPolicy) -> Caller:
        """The caller for holders of this tenant's keys."""
        return Caller(
            tenant=policy.name,
            cache_salt=cache_salt(self.secret, policy),
            is_admin=policy.admin,
            priority_class=policy.priority_class,
            weight=policy.weight,
            models=policy.models,
            max_prompt_tokens=policy.max_prompt_tokens,
            max_output_tokens=policy.max_output_tokens,
            targets=RequestTargets(policy.ttft_slo_s, policy.tpot_slo_s),
            on_late=policy.on_late,
        )


def cache_salt(secret: bytes, policy: TenantPolicy) -> bytes:
    """16 bytes, not guessable without the secret: HMAC-SHA256 of the tenant's name, or of its group's."""
    group = policy.shared_cache_group
    owner = f"tenant:{policy.name}" if group is None else f"group:{group}"
    return hmac.digest(secret, owner.encode(), hashlib.sha256)[:SALT_BYTES]


def new_secret() -> bytes:
    """A random secret, for files without a secret file."""
    return secrets.token_bytes(32)


def load_tenants(path: Path, fallback_secret: bytes) -> TenantsConfig:
    """Reads the file and its secret. Raises ConfigError naming line, field and bound, without repeating key hashes."""
    yaml_file = read_yaml_file(path, "tenants", most_bytes=MAX_TENANTS_BYTES)
    with yaml_file.naming_lines():
        file = yaml_file.validated(TenantsFile, "tenants")
        if file.cache_salt_secret_file is None:
            return TenantsConfig(file, fallback_secret)
        secret_path = path.parent / file.cache_salt_secret_file
        return TenantsConfig(file, _read_secret(secret_path), secret_path)


def _read_secret(path: Path) -> bytes:
    secret = read_named_file(path, SECRET_FIELD).strip()
    if len(secret) < LEAST_SECRET_BYTES:
        message = f"{SECRET_FIELD}: {path} must hold at least {LEAST_SECRET_BYTES} bytes"
        raise ConfigError(message, field=SECRET_FIELD)
    return secret


def _repeated(values: Iterable[str]) -> str | None:
    return next((value for value, count in Counter(values).items() if count > 1), None)
