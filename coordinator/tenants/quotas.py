"""Quotas as a gate: what a tenant may begin, and what its answers cost while they are sent."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.gates import Passage
from coordinator.request_validation import Generation
from coordinator.tenants.accounts import Account, Outcome
from coordinator.tenants.tenants import Tenants


class _Metered(Passage):
    """Charges output as it is sent."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def sent(self, output_tokens: int) -> None:
        """See Passage."""
        self._account.sent(output_tokens, time.monotonic())


class TenantQuotas:
    """A Gate. Never waits: a tenant over its quota is told when to come again."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    @asynccontextmanager
    async def entered(self, generation: Generation) -> AsyncIterator[Passage]:
        """See Gate."""
        account = self._tenants.account(generation.caller)
        account.begin(generation, time.monotonic())
        outcome: Outcome = "failed"
        try:
            yield _Metered(account)
            outcome = "completed"
        finally:
            account.end(outcome)
