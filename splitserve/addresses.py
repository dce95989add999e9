""" "host:port" addresses: validation, formatting, and finding a free port."""

from __future__ import annotations

import errno
import ipaddress
import re
import secrets
import socket
from contextlib import suppress

from splitserve.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError

_ADDRESS = re.compile(r"(?P<host>\[(?P<ipv6>[^\[\]]+)\]|[^:\[\]]+):(?P<port>[0-9]{1,5})\Z")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\Z")
"""A label of a host name as in RFC 1123, with the underscores that container names have."""
_SCOPE = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
MAX_HOST_CHARACTERS = 253
MAX_PORT = 65535
QUIET_PORTS = range(10_000, 32_768)
"""Services whose port is not named get one of these: systems give outgoing connections ports above them."""
_TRIES = 100
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def check_address(address: str, field: str) -> str:
    """Returns the address. Raises InvalidArgumentError naming `field` unless it is "host:port" with a host name
    (RFC 1123), an IPv4 address or an IPv6 address in brackets, and a port of 1..65535."""
    match = _ADDRESS.match(address)
    if match is None or not 1 <= int(match["port"]) <= MAX_PORT:
        raise _bad_address(field, address, '"host:port" with a port of 1..65535')
    if match["ipv6"] is not None:
        if not _is_ipv6(match["ipv6"]):
            raise _bad_address(field, address, '"[IPv6 address]:port"')
    elif not _is_host(match["host"]):
        raise _bad_address(field, address, '"host:port" with a valid host name or IPv4 address')
    return address


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of a checked address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_host(host: str) -> bool:
    labels = host.removesuffix(".").split(".")
    if labels[-1].isdecimal():  # no top-level domain is a number: this is meant as an IPv4 address
        try:
            return host.isascii() and ipaddress.IPv4Address(host) is not None
        except ValueError:
            return False
    return len(host) <= MAX_HOST_CHARACTERS and all(_LABEL.match(label) for label in labels)


def _is_ipv6(text: str) -> bool:
    bare, percent, scope = text.partition("%")
    try:
        ipaddress.IPv6Address(bare)
    except ValueError:
        return False
    return not percent or _SCOPE.match(scope) is not None


def _bad_address(field: str, address: str, bound: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} must be {bound} (given: {address[:300]!r})", field=field)


def join_address(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable_host(host: str) -> str:
    """The host under which a server that listens on `host` is reachable from this machine."""
    return _ANY_HOST.get(host, host)


def claim_port(host: str, port: int, setting: str = "grpc_port") -> int:
    """A port of `host` that is free now: `port`, or any free one for 0, one of `QUIET_PORTS` if there is one.

    Raises FailedPreconditionError (PORT_IN_USE) or UnavailableError (BIND_FAILED). The port is not held: another
    program may take it before the service binds it; the service then reports the same error. No outgoing connection
    takes one of QUIET_PORTS by chance, then or while the service restarts.
    """
    if port == 0:
        for _ in range(_TRIES):
            with suppress(FailedPreconditionError):
                return _claimed(host, secrets.choice(QUIET_PORTS), setting)
    return _claimed(host, port, setting)


def _claimed(host: str, port: int, setting: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # With SO_REUSEADDR, bind may succeed although another socket listens; listen then fails.
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
