"""`ucx` never uses cuda_ipc, whatever UCX_TLS allows."""

from __future__ import annotations

import pytest

from kv_transfer.transports.ucx.binding import without_cuda_ipc


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (None, "^cuda_ipc"),
        ("", "^cuda_ipc"),
        ("all", "^cuda_ipc"),
        ("tcp", "tcp"),
        ("rc,cuda_copy,cuda_ipc,sm,self", "rc,cuda_copy,sm,self"),
        ("tcp, cuda", "tcp,cuda_copy,gdr_copy"),
        ("cuda_ipc", "^cuda_ipc"),
        ("^tcp", "^tcp,cuda_ipc"),
        ("^cuda_ipc,tcp", "^cuda_ipc,tcp"),
        ("^cuda", "^cuda"),
    ],
)
def test_lanes(given: str | None, used: str) -> None:
    assert without_cuda_ipc(given) == used
