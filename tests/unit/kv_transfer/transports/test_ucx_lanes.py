"""Lanes that UCX must not use are left out, whatever UCX_TLS says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_transfer.transports import ucx_lanes
from kv_transfer.transports.ucx_lanes import lanes_without, lanes_without_room


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
def test_cuda_ipc_is_never_used(given: str | None, used: str) -> None:
    assert lanes_without(given, ["cuda_ipc"]) == used


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (None, "^cuda_ipc,posix"),
        ("rc,sm,self", "rc,sysv,cma,xpmem,knem,self"),
        ("mm,tcp", "sysv,xpmem,tcp"),
        ("cuda_ipc,posix", "^cuda_ipc,posix"),
        ("^posix", "^posix,cuda_ipc"),
        ("^sm", "^sm,cuda_ipc"),
    ],
)
def test_several_are_left_out(given: str | None, used: str) -> None:
    assert lanes_without(given, ["cuda_ipc", "posix"]) == used


def test_too_little_shared_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ucx_lanes, "NEEDED_BYTES", 2**80)
    assert lanes_without_room(tmp_path) == ["posix"]
    (record,) = caplog.records
    assert f"{tmp_path} has" in record.__dict__["event_fields"]["error"]
    monkeypatch.setattr(ucx_lanes, "NEEDED_BYTES", 0)
    assert lanes_without_room(tmp_path) == []
    monkeypatch.setattr(ucx_lanes, "NEEDED_BYTES", 2**80)
    assert lanes_without_room(tmp_path / "missing") == []
