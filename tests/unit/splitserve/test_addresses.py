"""Addresses: host names, IPv4 and IPv6, and everything that only looks like one."""

from __future__ import annotations

import pytest

from splitserve.addresses import check_address, split_address
from splitserve.errors import InvalidArgumentError

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
