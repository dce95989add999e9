"""How threads that compute wait for each other, as libgomp itself tells when it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from splitserve.cli import services
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from tests.support.waiting import PATIENCE_S

PROGRAM = """
from splitserve.cluster.compute_threads import set_compute_threads, spin_briefly
set_compute_threads(3)
spin_briefly()
import torch
"""


ENVIRONMENT = "splitserve.cluster.compute_threads.os.environ"


@pytest.mark.parametrize(("kind", "spins"), [("torch", "1000"), ("simulated", "1000"), ("vllm", None)])
def test_workers_set_it_before_anything_computes_but_for_vllm(
    kind: str, spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables: dict[str, str] = {}
    monkeypatch.setattr(ENVIRONMENT, variables)
    engine = EngineConfig.model_validate({"kind": kind, "threads": 2})
    services._claim_cores(WorkerConfig(worker_id="w", model="m", engine=engine))
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables.get("GOMP_SPINCOUNT") == spins


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="only there")
@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
)
def test_threads_spin_briefly_unless_the_environment_says_how_long(
    given: Mapping[str, str], spins: str
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=kept | {"OMP_DISPLAY_ENV": "VERBOSE"} | given,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in told.stderr:
        pytest.skip("this build of torch has another OpenMP than libgomp")
    assert "OMP_NUM_THREADS = '3'" in told.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in told.stderr
