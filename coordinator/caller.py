"""Who asks, as every face of the coordinator establishes it before anything else is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Protocol

PriorityClass = Literal["interactive", "standard", "batch"]


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant behind a request. Without tenants configured everyone is `ANYONE`."""

    tenant: str
    """Name of the tenant; bounded by the policy file, so it may be a metric's label."""
    cache_salt: bytes = b""
    """Separates prefix caches: callers share cached KV only where it is equal. Derived by the server, never sent."""
    is_admin: bool = False
    """Whether metadata of the cluster and changes to it are open to this caller."""
    priority_class: PriorityClass = "standard"
    """How urgent this tenant's requests are, before any priority that a request names."""
    weight: float = 1.0
    """This tenant's part of a crowded cluster, beside the weights of the others."""
    models: tuple[str, ...] = ("*",)
    """Patterns of the model names that exist for this caller."""
    max_prompt_tokens: int | None = None
    """Tokens of one prompt at most; None: as many as the context takes."""
    max_output_tokens: int | None = None
    """Output tokens of one request at most, and the default; None: as many as the context takes."""

    def may_use(self, model: str) -> bool:
        """Whether this model exists for the caller."""
        return "*" in self.models or any(fnmatchcase(model, pattern) for pattern in self.models)


ANYONE = Caller("default", is_admin=True)


class Authenticator(Protocol):
    """Turns a credential into a caller."""

    def caller(self, credential: str | None) -> Caller:
        """Who holds this API key; None: no key was given. Raises UnauthenticatedError. Never blocks."""


class OpenDoor:
    """No tenants configured: everyone is `ANYONE`."""

    def caller(self, credential: str | None) -> Caller:
        """See Authenticator."""
        return ANYONE
