"""Fair shares by virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

Whoever has had the least service for its weight is next. Service is charged as it is given, prompts at their start
and output tokens as they are sent. Someone who comes back from idling is lifted to the least of those who wait, so that
idling saves nothing up. While two parties both wait all the time, their service for their weight differs at no moment
by more than 2 max(prompt cost of the longest prompt, output cost of all that can run at once) / weight (theorem 4.4).
Nobody has a reserved part: what one does not ask for the others get.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(eq=False, slots=True)
class Account:
    """One party's counter."""

    weight: float
    served: float = 0.0
    """Service had so far, over the weight; lifted after idling."""
    waiting: int = 0
    """Requests in the queue."""

    def charge(self, cost: float) -> None:
        """Counts service."""
        self.served += cost / self.weight


class FairShare(Generic[K]):
    """The accounts of all parties that were ever seen: as many as there are names."""

    def __init__(self) -> None:
        self._accounts: dict[K, Account] = {}
        self._waiting: dict[K, Account] = {}
        self._last_left: Account | None = None

    def account(self, key: K, weight: float) -> Account:
        """The account of that name; its weight is the latest given."""
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(weight)
        account.weight = weight
        return account

    def joins(self, key: K, account: Account) -> None:
        """One more of this party's requests waits. The first one lifts its counter."""
        account.waiting += 1
        if account.waiting > 1:
            return
        if self._waiting:
            account.served = max(account.served, min(other.served for other in self._waiting.values()))
        elif self._last_left is not None:
            account.served = max(account.served, self._last_left.served)
        self._waiting[key] = account

    def passes(self, account: Account) -> None:
        """One of this party's requests goes on while nobody waits: as if it had joined and left."""
        if self._last_left is not None and self._last_left is not account:
            account.served = max(account.served, self._last_left.served)
        self._last_left = account

    def leaves(self, key: K, account: Account) -> None:
        """One of this party's requests waits no more."""
        account.waiting -= 1
        if not account.waiting:
            del self._waiting[key]
            self._last_left = account

    @property
    def waiting(self) -> dict[K, Account]:
        """The parties that wait."""
        return self._waiting
