"""Ports for processes that are to be found at the same place after a restart."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nobody listens at now, outside the range the system gives to connections where possible."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
