"""Choosing a transport by its configured name."""

from __future__ import annotations

from kv_transfer.memory_transport import MemoryHub, MemoryTransport
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.transport import Transport
from kv_transfer.ucx_transport import IDLE_POLL_S, UcxTransport
from splitserve.errors import ConfigError

_UNASKED_POLL_S = 1.0
"""Often enough that what nobody waits for, as a stranger's notifications, is judged and does not pile up."""
_PROCESS_HUB = MemoryHub()
"""All memory transports that configuration asks for in this process meet here."""


def idle_poll_s(kind: str) -> float:
    """How often, in seconds, a worker that waits for nothing must poll so that peers get an answer."""
    return IDLE_POLL_S if kind == UcxTransport.kind else _UNASKED_POLL_S


def make_transport(kind: str) -> Transport:
    """A transport for `WorkerConfig.transport`: "nixl", "ucx" or "memory".

    To be called on the thread that will use it. Raises ConfigError for another kind and UnavailableError
    when NIXL or UCXX is not installed.
    """
    if kind == NixlTransport.kind:
        return NixlTransport()
    if kind == UcxTransport.kind:
        return UcxTransport()
    if kind == MemoryTransport.kind:
        return MemoryTransport(_PROCESS_HUB)
    raise ConfigError(f"transport: unknown kind {kind!r}; known: nixl, ucx, memory", field="transport")
