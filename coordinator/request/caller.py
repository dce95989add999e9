"""The caller of a request, which every entrypoint authenticates before it reads anything else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, Protocol

from splitserve.config.coordinator import OnLate
from splitserve.v1 import generation_pb2

PriorityClass = Literal["interactive", "standard", "batch"]


@dataclass(frozen=True, slots=True)
class RequestTargets:
    """Seconds to the first token, and mean seconds a token after it; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_TARGETS = RequestTargets()


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant behind a request. Without configured tenants, every caller is `ANYONE`."""

    tenant: str
    """Name of the tenant. The policy file bounds the set of names, so it may be a metric label."""
    cache_salt: bytes = b""
    """Separates prefix caches: callers share cached KV only if their salts are equal. Derived by the server."""
    is_admin: bool = False
    """Whether the caller may read and change cluster state."""
    priority_class: PriorityClass = "standard"
    """Urgency of this tenant's requests; takes precedence over a request's own priority."""
    weight: float = 1.0
    """Share of a saturated cluster, relative to the other tenants' weights."""
    models: tuple[str, ...] = ("*",)
    """Patterns of the model names that the caller may use; others do not exist for it."""
    max_prompt_tokens: int | None = None
    """Tokens per prompt, at most; None: limited by the context only."""
    max_output_tokens: int | None = None
    """Output tokens per request, at most, and the default; None: limited by the context only."""

    targets: RequestTargets | None = None
    """The tenant's own; what is None there, and None here, is that of the settings."""
    on_late: OnLate | None = None
    """What becomes of its requests that would miss their TTFT target; None: what the settings say."""
    any_target: bool = False
    """Whether a request may name a target where neither tenant nor settings have one. It would go before other
    tenants' requests by it."""

    def may_use(self, model: str) -> bool:
        """Whether the caller may use this model."""
        return "*" in self.models or any(fnmatchcase(model, pattern) for pattern in self.models)


ANYONE = Caller("default", is_admin=True, any_target=True)


CLASS_RANKS: Mapping[PriorityClass, int] = MappingProxyType({"interactive": 1, "standard": 0, "batch": -1})
"""Higher is served first on workers."""


def precedence_of(tenant: str, priority_class: PriorityClass, priority: int) -> generation_pb2.Precedence:
    """Where a tenant's request with this `priority` of its own stands in the workers' queues."""
    return generation_pb2.Precedence(
        class_rank=CLASS_RANKS[priority_class], tenant_key=_tenant_key(tenant), within_tenant=priority
    )


@lru_cache(maxsize=4096)
def _tenant_key(tenant: str) -> int:
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:8], "little")


class Authenticator(Protocol):
    """Resolves a credential to a caller."""

    def caller(self, credential: str | None) -> Caller:
        """The holder of this API key; None: no key was given. Raises UnauthenticatedError. Never blocks."""


class AnonymousAuthenticator:
    """The Authenticator without configured tenants: every caller is `ANYONE`."""

    def caller(self, credential: str | None) -> Caller:
        """See Authenticator."""
        return ANYONE
