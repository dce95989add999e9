""" "host:port" addresses: checking them, joining them, and finding a port to listen on."""

from __future__ import annotations

import errno
import re
import socket

from splitserve.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError

_ADDRESS = re.compile(r"^(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})$")
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def check_address(address: str, field: str) -> str:
    """The address itself. Raises InvalidArgumentError naming `field` unless it is "host:port", port 1..65535."""
    match = _ADDRESS.match(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise InvalidArgumentError(
            f'{field} must be "host:port" with a port of 1..65535 (given: {address!r})', field=field
        )
    return address


def join_address(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable_host(host: str) -> str:
    """The host at which a server that listens on `host` can be reached from this machine."""
    return _ANY_HOST.get(host, host)


def claim_port(host: str, port: int, setting: str = "grpc_port") -> int:
    """A port of `host` that can be listened on now: `port`, or a free one for 0.

    Raises FailedPreconditionError (PORT_IN_USE) or UnavailableError (BIND_FAILED). Nothing keeps another
    program from taking the port before it is used; the service itself then fails with the same words.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Binding succeeds beside a listener that shares its port; listening does not.
            probe.listen(1)
        except OSError as error:
            raise _bind_error(host, port, setting, error) from None
        bound: int = probe.getsockname()[1]
    return bound


def _bind_error(
    host: str, port: int, setting: str, error: OSError
) -> FailedPreconditionError | UnavailableError:
    if error.errno == errno.EADDRINUSE:
        option = f"--{setting.replace('_', '-')}"
        return FailedPreconditionError(
            f"port {port} on {host} is already in use (choose another with {option}; 0 takes a free one)",
            reason="PORT_IN_USE",
            field=setting,
        )
    return UnavailableError(
        f"cannot listen on {join_address(host, port)}: {error.strerror}", reason="BIND_FAILED"
    )
