"""Who asks, as every face of the coordinator establishes it before anything else is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant behind a request. Without tenants configured everyone is `ANYONE`."""

    tenant: str
    """Name of the tenant; bounded by the policy file, so it may be a metric's label."""
    cache_salt: bytes = b""
    """Separates prefix caches: callers share cached KV only where it is equal. Derived by the server, never sent."""
    is_admin: bool = False
    """Whether metadata of the cluster and changes to it are open to this caller."""


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
