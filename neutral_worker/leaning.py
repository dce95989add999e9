"""Which pool a neutral worker leans to. Pure."""

from __future__ import annotations

from engine.worker.role import POOL_NAMES
from splitserve.v1 import registry_pb2

POOLS = {name: pool for pool, name in POOL_NAMES.items()}


class Leaning:
    """The pool that a worker leans to now. The worker owns it; coordinators ask."""

    def __init__(self, name: str) -> None:
        """`name`: "prefill" or "decode"."""
        self.pool = POOLS[name]
        self.changes = 0
        """Changes since the start."""

    @property
    def name(self) -> str:
        """The name of the pool."""
        return POOL_NAMES[self.pool]

    def follow(self, pool: registry_pb2.Pool.ValueType) -> bool:
        """Leans to a pool; returns whether that is a change. A value that is no known pool changes nothing."""
        if pool == self.pool or pool not in POOL_NAMES:
            return False
        self.pool = pool
        self.changes += 1
        return True
