"""Access control of the coordinator, by TLS, the cluster token and tenants."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from coordinator.request.inference_request import (
    ANYONE,
    AnonymousAuthenticator,
    Authenticator,
    Caller,
)
from coordinator.tenants.tenants import Tenants
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import PermissionDeniedError
from splitserve.logs import log_event
from splitserve.rpc.credentials import cluster_credentials, is_loopback, warn_if_open
from splitserve.security.tls import Role
from splitserve.v1 import registry_pb2

WORKERS: frozenset[Role] = frozenset({"worker"})
OPERATORS: frozenset[Role] = frozenset({"autoscaler", "admin"})
CLUSTER = Caller("cluster", is_admin=True)
"""The caller for the cluster's own processes when they act as clients."""

Context = grpc.aio.ServicerContext[Any, Any]


class AccessControl:
    """Built once from the settings. Raises ConfigError."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.security = cluster_credentials("coordinator", config.tls, config.cluster_token_file)
        registry = registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name
        self.guard = self.security.authorizer({registry: WORKERS})
        self.tenants = Tenants(config.tenants) if config.tenants else None
        """None: no tenants are configured."""
        self.authenticator: Authenticator = self.tenants or AnonymousAuthenticator()

    def tenant(self, name: str) -> tuple[Caller, int | None] | None:
        """The caller of a tenant's own requests, without its key, and the most requests that it may have in progress,
        if there is a bound; None: there is no such tenant."""
        if self.tenants is None:
            return (ANYONE, None) if name == ANYONE.tenant else None
        return self.tenants.named(name)

    def caller(self, context: Context) -> Caller:
        """The caller of a gRPC call. Raises UnauthenticatedError."""
        key = credential_of(context)
        if key is None and self.guard.closed and self.guard.rejection(OPERATORS, context) is None:
            return CLUSTER
        return self.authenticator.caller(key)

    def require_operator(self, context: Context) -> None:
        """Requires an operator's certificate, the cluster token or an admin key. Without any of these configured, every
        caller passes.

        Raises UnauthenticatedError or PermissionDeniedError.
        """
        if self.guard.closed and self.tenants is None:
            if (rejection := self.guard.rejection(OPERATORS, context)) is not None:
                raise rejection
        else:
            self.require_reader(context)

    def require_reader(self, context: Context) -> None:
        """Requires the permission to see the whole cluster: with tenants, an admin key or an operator's credential.

        Raises UnauthenticatedError or PermissionDeniedError.
        """
        if not self.caller(context).is_admin:
            raise PermissionDeniedError("this needs an admin key", reason="ADMIN_ONLY")

    def warn_if_open(self, host: str) -> None:
        """Logs warnings about interfaces that the settings leave unprotected."""
        warn_if_open("coordinator", host, self.tenants is not None or self.security.tls is not None)
        if self.tenants is not None and self.security.tls is None and not is_loopback(host):
            advice = "API keys travel in clear text; use it behind something that encrypts"
            log_event("security.keys_in_clear", level=logging.WARNING, host=host, advice=advice)


BEARER = "bearer "


def credential_of(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """The API key of a gRPC call, from `authorization: Bearer KEY` or `x-api-key`; None without one."""
    key: str | None = None
    for name, value in context.invocation_metadata() or ():
        text = value if isinstance(value, str) else ""
        if name == "authorization" and text[: len(BEARER)].lower() == BEARER:
            return text[len(BEARER) :].strip()
        if name == "x-api-key":
            key = text
    return key
