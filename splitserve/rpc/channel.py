"""gRPC channels, and the channel options shared with servers."""

from __future__ import annotations

from typing import Any

import grpc

from splitserve.security.tls import Role, TlsFiles, TlsPems, channel_credentials, read_pems, role_name

DEFAULT_MAX_MESSAGE_BYTES = 16 * 2**20
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
CONNECT_TIMEOUT_MS = 5_000
"""Limit of one attempt to connect. A peer on a busy machine, or one that is just starting, answers the handshake late;
a refused connection fails at once."""
LONG_LIVED_METHODS = frozenset(
    {
        "/splitserve.v1.RegistryService/Report",
        "/splitserve.v1.DecodeService/StreamOutputs",
        "/splitserve.v1.CallService/Carry",
    }
)
"""Streams that last as long as the connection; `OpenRpcs` does not count them."""

Options = list[tuple[str, Any]]


def channel_options(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> Options:
    """Client options: message limit, keepalive, fast reconnection, no proxy, no transparent retries."""
    return [
        *common_options(max_message_bytes),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # so gRPC calls that timeout
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        # The channel to a restarted peer must not inherit the back-off of the previous one.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def common_options(max_message_bytes: int) -> Options:
    """Options of clients and servers: message limit and keepalive."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def make_channel(
    address: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    tls: TlsFiles | TlsPems | None = None,
    peer: Role | None = None,
    read_ahead_bytes: int | None = None,
) -> grpc.aio.Channel:
    """A channel to "host:port". It connects at the first call; use it on one event loop only.

    `read_ahead_bytes` limits the unread bytes of each stream; by default gRPC adapts that limit. With `tls` the
    server's certificate must prove the host name or, if `peer` is given, that role in the cluster.
    """
    options = channel_options(max_message_bytes)
    if read_ahead_bytes is not None:
        options += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", read_ahead_bytes)]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if peer is not None:  # the name that the server's certificate must have
        options.append(("grpc.ssl_target_name_override", role_name(peer)))
    credentials = channel_credentials(read_pems(tls) if isinstance(tls, TlsFiles) else tls)
    return grpc.aio.secure_channel(address, credentials, options=options)
