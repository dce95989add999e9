"""Skips what needs the `ucx` transport where it is not installed."""

from __future__ import annotations

import pytest

from kv_transfer.transports.ucx.binding import load_ucxx
from splitserve.errors import UnavailableError


def require_ucx() -> None:
    """Skips the test that calls it, with the reason."""
    try:
        load_ucxx()
    except UnavailableError as error:
        pytest.skip(error.message)
