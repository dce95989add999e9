"""Ports for processes that are to be found at the same place after a restart."""

from __future__ import annotations

from splitserve.addresses import claim_port


def free_port() -> int:
    """A port that nobody listens at now, and that the system gives to no connection."""
    return claim_port("127.0.0.1", 0)
