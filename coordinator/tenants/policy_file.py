"""The file of tenants: one YAML mapping, validated as a whole. See docs/security.md for an example."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coordinator.caller import Caller, PriorityClass
from splitserve.config import read_settings_file
from splitserve.errors import ConfigError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Rate = Annotated[float, Field(gt=0, le=1e9)]
LEAST_SECRET_BYTES = 16
SALT_BYTES = 16
SECRET_FIELD = "cache_salt_secret_file"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TenantPolicy(_Section):
    """One tenant. What has no bound here has none."""

    name: Name
    """Stands in logs and metrics; unique in the file."""
    key_hashes: Annotated[tuple[KeyHash, ...], Field(max_length=64)] = ()
    """Hashes of this tenant's API keys, as `splitserve keys new` prints them. Two during a change of keys."""
    models: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ("*",)
    """Patterns of the model names, adapters included, that the tenant may use: `*`, `?` and `[...]`. Others do not
    exist for it."""
    requests_per_second: Rate | None = None
    """Requests that may begin."""
    prompt_tokens_per_second: Rate | None = None
    """Prompt tokens that may come in, cached ones included."""
    output_tokens_per_second: Rate | None = None
    """Tokens that may go out. They are counted as they go, so an answer may overdraw this; the next request waits
    until the debt is paid."""
    burst_seconds: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    """What so many idle seconds bring can be spent at once, of each rate; one request always."""
    max_concurrent_requests: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Requests in progress."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Tokens of one prompt."""
    max_output_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Output tokens of one request; the default for those that name no number."""
    priority_class: PriorityClass = "standard"
    """Who goes first where requests have to wait."""
    weight: Annotated[float, Field(ge=0.01, le=1000)] = 1.0
    """Part of a crowded cluster, beside the other tenants of the same class."""
    shared_cache_group: Name | None = None
    """Tenants of one group share cached KV of equal prompts, and can find out by timing what the others have asked.
    Default: nobody."""
    admin: bool = False
    """May see workers and metrics, and change the plan of scaling."""


class TenantsFile(_Section):
    """The whole file."""

    tenants: Annotated[tuple[TenantPolicy, ...], Field(min_length=1, max_length=10_000)]
    """The tenants."""
    cache_salt_secret_file: Path | None = None
    """File with at least 16 random bytes, from which each tenant's cache salt is derived; relative to this file's
    folder. Coordinators that share workers should share it. Default: random at each start, so that what was cached
    before is not found again."""

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
class TenantBook:
    """A file of tenants with its secret: everything that a request is decided by."""

    file: TenantsFile
    secret: bytes = field(repr=False)

    def caller(self, policy: TenantPolicy) -> Caller:
        """The caller that holders of this tenant's keys are."""
        return Caller(
            tenant=policy.name,
            cache_salt=cache_salt(self.secret, policy),
            is_admin=policy.admin,
            priority_class=policy.priority_class,
            weight=policy.weight,
            models=policy.models,
            max_prompt_tokens=policy.max_prompt_tokens,
            max_output_tokens=policy.max_output_tokens,
        )


def cache_salt(secret: bytes, policy: TenantPolicy) -> bytes:
    """16 bytes that nobody can guess without the secret: HMAC-SHA256 of the tenant's name, or of its group's."""
    group = policy.shared_cache_group
    owner = f"tenant:{policy.name}" if group is None else f"group:{group}"
    return hmac.digest(secret, owner.encode(), hashlib.sha256)[:SALT_BYTES]


def new_secret() -> bytes:
    """A random secret, for files that name none."""
    return secrets.token_bytes(32)


def load_tenants(path: Path, fallback_secret: bytes) -> TenantBook:
    """Reads the file and its secret. Raises ConfigError naming the field and its bound; no hash is repeated there."""
    try:
        file = TenantsFile.model_validate(read_settings_file(path))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "tenants"
        raise ConfigError(f"{path}: {place}: {first['msg']}", field=place) from None
    if file.cache_salt_secret_file is None:
        return TenantBook(file, fallback_secret)
    return TenantBook(file, _read_secret(path.parent / file.cache_salt_secret_file))


def _read_secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        message = f"{SECRET_FIELD}: cannot read {path}: {error.strerror}"
        raise ConfigError(message, field=SECRET_FIELD) from None
    if len(secret) < LEAST_SECRET_BYTES:
        message = f"{SECRET_FIELD}: {path} must hold at least {LEAST_SECRET_BYTES} bytes"
        raise ConfigError(message, field=SECRET_FIELD)
    return secret


def _repeated(values: Iterable[str]) -> str | None:
    return next((value for value, count in Counter(values).items() if count > 1), None)
