"""Authorization of gRPC calls by the caller's certificate, the cluster token, or both."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from splitserve.errors import PermissionDeniedError, SplitserveError, UnauthenticatedError
from splitserve.security.tls import Role, peer_identity

TOKEN_KEY = "x-splitserve-cluster-token"
ANY_SERVICE = "*"

Context = grpc.aio.ServicerContext[Any, Any]
Rules = Mapping[str, frozenset[Role]]
"""The roles that may call a service, by its full name or ANY_SERVICE. Services without a rule, such as gRPC's health
and reflection, are open to anybody who can connect."""


@dataclass(frozen=True, slots=True)
class RpcAuthorizer:
    """Decides which calls a server accepts. With neither TLS nor a token it accepts all."""

    rules: Rules = field(default_factory=dict)
    mutual: bool = False
    """Mutual TLS is on: the caller's certificate must contain one of the roles."""
    token: str | None = field(default=None, repr=False)
    """The token that callers must send."""

    @property
    def closed(self) -> bool:
        """Whether any credential is required."""
        return self.mutual or self.token is not None

    def check(self, service: str, context: Context) -> None:
        """Raises UnauthenticatedError (CLUSTER_TOKEN) or PermissionDeniedError (WRONG_ROLE) for a refused call."""
        roles = self.rules.get(service, self.rules.get(ANY_SERVICE))
        if roles is not None and (error := self.rejection(roles, context)) is not None:
            raise error

    def rejection(self, roles: frozenset[Role], context: Context) -> SplitserveError | None:
        """The error if the caller cannot prove one of these roles; None if it can."""
        if self.mutual:
            presented = peer_identity(context).roles
            if not presented & roles:
                who = (
                    f"a certificate of {', '.join(sorted(presented))}"
                    if presented
                    else "no certificate of a role"
                )
                message = f"only {' or '.join(sorted(roles))} may call this; the call came with {who}"
                return PermissionDeniedError(message, reason="WRONG_ROLE")
        if self.token is not None and not _holds(context, self.token):
            return UnauthenticatedError(
                "the call carries no or a wrong cluster token", reason="CLUSTER_TOKEN"
            )
        return None


ALLOW_ALL = RpcAuthorizer()


def _holds(context: Context, token: str) -> bool:
    for name, value in context.invocation_metadata() or ():
        if name == TOKEN_KEY:
            sent = value.encode("utf-8", "replace") if isinstance(value, str) else bytes(value)
            return hmac.compare_digest(sent, token.encode())
    return False
