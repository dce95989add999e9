"""What a worker does for requests: the names of roles, their pools, and their numbers in the protocol.

The autoscaler's plan, or whoever starts a worker, gives it a role; the worker reports it; coordinators route by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from splitserve.v1 import registry_pb2

PoolName = Literal["prefill", "decode"]
POOLS: tuple[PoolName, PoolName] = ("prefill", "decode")
OTHER_POOL: Mapping[PoolName, PoolName] = MappingProxyType({"prefill": "decode", "decode": "prefill"})
RoleName = Literal["prefill", "decode", "both"]
"""`prefill` computes prompts, `decode` streams tokens. A worker of role `both` does both, and is in both pools."""

POOLS_OF: Mapping[RoleName, frozenset[PoolName]] = MappingProxyType(
    {
        "prefill": frozenset({"prefill"}),
        "decode": frozenset({"decode"}),
        "both": frozenset({"prefill", "decode"}),
    }
)
ROLE_NUMBERS: Mapping[RoleName, registry_pb2.Role.ValueType] = MappingProxyType(
    {
        "prefill": registry_pb2.ROLE_PREFILL,
        "decode": registry_pb2.ROLE_DECODE,
        "both": registry_pb2.ROLE_BOTH,
    }
)
ROLE_NAMES: Mapping[int, RoleName] = MappingProxyType({number: name for name, number in ROLE_NUMBERS.items()})
"""The roles by number, without those that only later versions know."""
