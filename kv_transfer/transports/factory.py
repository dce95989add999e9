"""Creates the configured transport."""

from __future__ import annotations

from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from kv_transfer.transports.nixl.transport import NixlTransport
from kv_transfer.transports.transport import VRAM, Transport
from kv_transfer.transports.ucx.transport import IDLE_POLL_S, UcxTransport
from splitserve.errors import ConfigError

_DEFAULT_IDLE_POLL_S = 1.0
"""Bounds how long unsolicited notifications stay unread."""
_PROCESS_HUB = MemoryHub()
"""Shared by all configured memory transports of this process."""


def idle_poll_s(kind: str, memory_kind: str) -> float:
    """Longest time in seconds between two polls of an idle worker, so that peers get an answer.

    Short where nothing but polls makes progress: with `ucx`, and for the memory of a device (`memory_kind` "VRAM").
    """
    return IDLE_POLL_S if kind == UcxTransport.kind or memory_kind == VRAM else _DEFAULT_IDLE_POLL_S


def make_transport(kind: str) -> Transport:
    """Creates the transport for `WorkerConfig.transport`: "nixl", "ucx" or "memory".

    Call it on the thread that will use the transport. Raises ConfigError for another kind and UnavailableError
    if NIXL or UCXX is not installed.
    """
    if kind == NixlTransport.kind:
        return NixlTransport()
    if kind == UcxTransport.kind:
        return UcxTransport()
    if kind == MemoryTransport.kind:
        return MemoryTransport(_PROCESS_HUB)
    raise ConfigError(f"transport: unknown kind {kind!r}; known: nixl, ucx, memory", field="transport")
