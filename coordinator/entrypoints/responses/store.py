"""Responses that later requests may continue, in memory. Coordinators share none."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from splitserve.errors import NotFoundError

MAX_RESPONSES = 1024
"""Most responses of one tenant."""
TENANT_BYTES, STORE_BYTES = 16 * 2**20, 64 * 2**20
"""Most bytes of one tenant's responses, and of all."""


class StoredResponse(NamedTuple):
    """A response with what led to it."""

    whole: bytes
    """The response object."""
    items: bytes
    """The items of the whole conversation, without instructions: a JSON list."""

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.whole) + len(self.items)


class ResponseStore:
    """The last used responses of each tenant. Above STORE_BYTES, the tenant with most bytes loses its oldest ones."""

    def __init__(self) -> None:
        self._responses: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._sizes: dict[str, int] = {}

    def add(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Stores a response, unless it is larger than TENANT_BYTES; one of the same id is replaced."""
        self._drop(tenant, response_id)
        if response.size > TENANT_BYTES:
            return
        own = self._responses[tenant]
        own[response_id] = response
        self._sizes[tenant] = self._sizes.get(tenant, 0) + response.size
        while len(own) > MAX_RESPONSES or self._sizes[tenant] > TENANT_BYTES:
            self._drop(tenant, next(iter(own)))
        while sum(self._sizes.values()) > STORE_BYTES:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(largest, next(iter(self._responses[largest])))

    def get(self, tenant: str, response_id: str, field: str = "response_id") -> StoredResponse:
        """A response of this tenant. Raises NotFoundError that names the `field` with the id."""
        if response_id not in self._responses.get(tenant, ()):
            message = f"{field}: response {response_id[:128]!r} is not stored here"
            reason = field.upper().replace("_ID", "_NOT_FOUND")
            raise NotFoundError(message, reason=reason, field=field)
        self._responses[tenant].move_to_end(response_id)
        return self._responses[tenant][response_id]

    def delete(self, tenant: str, response_id: str) -> None:
        """Forgets a response of this tenant. Raises NotFoundError."""
        self.get(tenant, response_id)
        self._drop(tenant, response_id)

    def _drop(self, tenant: str, response_id: str) -> None:
        dropped = self._responses.setdefault(tenant, OrderedDict()).pop(response_id, None)
        if dropped is not None:
            self._sizes[tenant] -= dropped.size
