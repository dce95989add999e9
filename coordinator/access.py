"""Who may do what on this coordinator: TLS, the cluster token and tenants, as the settings say."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import grpc
from prometheus_client.core import Metric

from coordinator.caller import Authenticator, Caller, OpenDoor
from coordinator.credentials import credential_of
from coordinator.gates import Gate
from coordinator.tenants.quotas import TenantQuotas
from coordinator.tenants.tenant_metrics import tenant_metrics
from coordinator.tenants.tenants import Tenants
from splitserve.config import CoordinatorConfig
from splitserve.errors import PermissionDeniedError
from splitserve.logs import log_event
from splitserve.part_security import is_loopback, part_security, warn_if_open
from splitserve.tls import Role
from splitserve.v1 import registry_pb2

WORKERS: frozenset[Role] = frozenset({"prefill", "decode"})
OPERATORS: frozenset[Role] = frozenset({"autoscaler", "admin"})
CLUSTER = Caller("cluster", is_admin=True)
"""The cluster's own parts, where they ask as clients do."""

Context = grpc.aio.ServicerContext[Any, Any]


class Access:
    """Built once from the settings. Raises ConfigError."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.security = part_security("coordinator", config.tls, config.cluster_token_file)
        registry = registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name
        self.guard = self.security.guard({registry: WORKERS})
        self._tenants = Tenants(config.tenants) if config.tenants else None
        self.authenticator: Authenticator = self._tenants or OpenDoor()

    @property
    def gates(self) -> Sequence[Gate]:
        """What requests pass because of their tenant."""
        return (TenantQuotas(self._tenants),) if self._tenants else ()

    def caller(self, context: Context) -> Caller:
        """Who makes this call. Raises UnauthenticatedError."""
        key = credential_of(context)
        if key is None and self.guard.closed and self.guard.objection(OPERATORS, context) is None:
            return CLUSTER
        return self.authenticator.caller(key)

    def require_operator(self, context: Context) -> None:
        """Lets operators' certificates, the cluster token and admin keys pass. With none of these set up: everybody.

        Raises UnauthenticatedError or PermissionDeniedError.
        """
        if self.guard.closed and self._tenants is None:
            if (objection := self.guard.objection(OPERATORS, context)) is not None:
                raise objection
        elif not self.caller(context).is_admin:
            raise PermissionDeniedError("this needs an admin key", reason="ADMIN_ONLY")

    def metrics(self) -> list[Metric]:
        """What the tenants have used."""
        return tenant_metrics(self._tenants) if self._tenants else []

    async def follow_files(self) -> None:
        """Adopts changes of the file of tenants, until cancelled."""
        if self._tenants is not None:
            await self._tenants.follow()

    def warn_if_open(self, host: str) -> None:
        """Says loudly what the settings leave open."""
        warn_if_open("coordinator", host, self._tenants is not None or self.security.tls is not None)
        if self._tenants is not None and self.security.tls is None and not is_loopback(host):
            advice = "API keys travel in clear text; use it behind something that encrypts"
            log_event("security.keys_in_clear", level=logging.WARNING, host=host, advice=advice)
