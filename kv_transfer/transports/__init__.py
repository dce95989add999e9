"""Transports move KV blocks between workers' memories. Read `transport.py` first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.errors import ConfigError

if TYPE_CHECKING:
    from kv_transfer.transports.transport import Transport


def make_transport(kind: str) -> Transport:
    """Creates the transport for `WorkerConfig.transport`: "nixl" or "ucx".

    Call it on the thread that will use the transport. Raises ConfigError for another kind and UnavailableError
    if NIXL or UCXX is not installed.
    """
    # Imported here: each module of `kv_transfer.transports` loads this file first.
    match kind:
        case "nixl":
            from kv_transfer.transports.nixl.transport import NixlTransport

            return NixlTransport()
        case "ucx":
            from kv_transfer.transports.ucx.transport import UcxTransport

            return UcxTransport()
    raise ConfigError(f"transport: unknown kind {kind!r}; known: nixl, ucx", field="transport")
