"""`splitserve up --tls` with a broken chain of certificates: it says at once whose certificate is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitserve.security.certificates import write_certificates
from tests.support.security.chains import write_chain
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"inner": (-10, -2)}, "CN=inner expired on 20"),
        (
            {"sent": ("leaf",)},
            "the certificate of CN=inner, which signed CN=worker, is neither in this file nor in",
        ),
        ({"leaf": (2, 10)}, "CN=worker is not valid before 20"),
    ],
)
def test_up_names_the_certificate(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    write_certificates(tmp_path, ["localhost", "127.0.0.1"], 30)
    authority = (tmp_path / "ca.pem").read_bytes()
    write_chain(tmp_path, **changed)
    with (tmp_path / "ca.pem").open("ab") as file:
        file.write(authority)
    command = [
        "up",
        "--engine",
        "simulated",
        "--grpc-port",
        "0",
        "--http-port",
        "off",
        "--tls",
        str(tmp_path),
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "launcher", *command, "--ready-timeout", "60"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "exited with code 2 before the cluster was ready: tls.certificate: " in line
    assert f"{tmp_path / 'worker.pem'}: {why}" in line
    assert "not ready within" not in line
