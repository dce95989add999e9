"""Addresses: host names, IPv4 and IPv6, and everything that only looks like one."""

from __future__ import annotations

import socket

import pytest

from splitserve.addresses import QUIET_PORTS, check_address, claim_port, split_address
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError

GOOD = {
    "localhost:1": ("localhost", 1),
    "decode-0.pool.svc.cluster.local:65535": ("decode-0.pool.svc.cluster.local", 65535),
    "compose_decode_1:50061": ("compose_decode_1", 50061),
    "host.:80": ("host.", 80),
    "127.0.0.1:50051": ("127.0.0.1", 50051),
    "[::1]:50051": ("::1", 50051),
    "[fe80::1%eth0]:1": ("fe80::1%eth0", 1),
    "[::ffff:10.0.0.1]:1": ("::ffff:10.0.0.1", 1),
    "1password.example:1": ("1password.example", 1),
}
BAD = [
    "a..b:1",
    ".a:1",
    "-a.b:1",
    "a-.b:1",
    "a." + "b" * 64 + ":1",
    ".".join(["abcdefgh"] * 30) + ":1",
    "256.1.1.1:1",
    "1.2.3:1",
    "1:1",
    "::1:1",
    "[::1:1",
    "[::g]:1",
    "[1.2.3.4]:1",
    "[fe80::1%e/h]:1",
    "[]:1",
    "bücher.example:1",
    "a b:1",
    "a\n:1",
    "a:1\n",
    "a/b:1",
    "host:",
    ":1",
    "host:0",
    "host:65536",
    "host:99999999999999999999",
    "host:\u0661",
    "host:+1",
    "host",
    "",
    "http://host:1",
    "unix:/tmp/socket",
    "x" * 10**6 + ":1",
]


@pytest.mark.parametrize("address", GOOD)
def test_good_addresses(address: str) -> None:
    assert check_address(address, "field") == address
    assert split_address(address) == GOOD[address]


@pytest.mark.parametrize("address", BAD, ids=lambda address: repr(address[:24]))
def test_bad_addresses(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be") as caught:
        check_address(address, "address")
    assert caught.value.field == "address"
    assert len(caught.value.message) < 500


def test_a_port_that_nobody_names_is_none_that_connections_get() -> None:
    claimed = {claim_port("127.0.0.1", 0) for _ in range(20)}
    assert claimed <= set(QUIET_PORTS)
    assert len(claimed) > 1


def test_a_port_in_use_and_an_address_of_another_machine_are_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(FailedPreconditionError, match=f"port {port} ") as caught:
            claim_port("127.0.0.1", port)
    assert (caught.value.reason, caught.value.field) == ("PORT_IN_USE", "grpc_port")
    with pytest.raises(UnavailableError, match=r"192\.0\.2\.1"):
        claim_port("192.0.2.1", 0)
