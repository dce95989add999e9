"""Choosing a transport by its configured name."""

from __future__ import annotations

from kv_transfer.memory_transport import MemoryHub, MemoryTransport
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.transport import Transport
from splitserve.errors import ConfigError

_PROCESS_HUB = MemoryHub()
"""All memory transports that configuration asks for in this process meet here."""


def make_transport(kind: str) -> Transport:
    """A transport for `WorkerConfig.transport`: "nixl" or "memory".

    To be called on the thread that will use it. Raises ConfigError for another kind and UnavailableError
    when NIXL is not installed.
    """
    if kind == NixlTransport.kind:
        return NixlTransport()
    if kind == MemoryTransport.kind:
        return MemoryTransport(_PROCESS_HUB)
    raise ConfigError(f"transport: unknown kind {kind!r}; known: nixl, memory", field="transport")
