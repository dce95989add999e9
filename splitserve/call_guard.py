"""Who may call which service: decided by the caller's certificate, by the cluster token, or by both."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from splitserve.errors import PermissionDeniedError, SplitserveError, UnauthenticatedError
from splitserve.tls import Role, peer_roles

TOKEN_KEY = "x-splitserve-cluster-token"
ANY_SERVICE = "*"

Context = grpc.aio.ServicerContext[Any, Any]
Rules = Mapping[str, frozenset[Role]]
"""Full name of a service, or ANY_SERVICE, to the roles that may call it. What is not named is open, and so are gRPC's
own services (health, reflection) as far as a connection is."""


@dataclass(frozen=True, slots=True)
class CallGuard:
    """What a server asks of its callers. With neither TLS nor a token everything is open."""

    rules: Rules = field(default_factory=dict)
    mutual: bool = False
    """TLS is on: the caller's certificate must name one of the roles."""
    token: str | None = field(default=None, repr=False)
    """Callers must send the same token."""

    @property
    def closed(self) -> bool:
        """Whether anything is asked at all."""
        return self.mutual or self.token is not None

    def check(self, service: str, context: Context) -> None:
        """Raises UnauthenticatedError (CLUSTER_TOKEN) or PermissionDeniedError (WRONG_ROLE) for a stranger."""
        roles = self.rules.get(service, self.rules.get(ANY_SERVICE))
        if roles is not None and (error := self.objection(roles, context)) is not None:
            raise error

    def objection(self, roles: frozenset[Role], context: Context) -> SplitserveError | None:
        """What speaks against taking this call for one of a part in these roles; None: nothing."""
        if self.mutual:
            shown = peer_roles(context)
            if not shown & roles:
                who = f"a certificate of {', '.join(sorted(shown))}" if shown else "no certificate of a role"
                message = f"only {' or '.join(sorted(roles))} may call this; the call came with {who}"
                return PermissionDeniedError(message, reason="WRONG_ROLE")
        if self.token is not None and not _holds(context, self.token):
            return UnauthenticatedError(
                "the call carries no or a wrong cluster token", reason="CLUSTER_TOKEN"
            )
        return None


OPEN_GUARD = CallGuard()


def _holds(context: Context, token: str) -> bool:
    for name, value in context.invocation_metadata() or ():
        if name == TOKEN_KEY:
            sent = value.encode("utf-8", "replace") if isinstance(value, str) else bytes(value)
            return hmac.compare_digest(sent, token.encode())
    return False
