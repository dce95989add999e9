"""How threads that compute wait for each other, as libgomp itself tells when it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from splitserve.cli import services
from splitserve.cluster.forking.owner import ForkServer
from splitserve.cluster.forking.server import Step
from splitserve.cluster.forking.services import fork_services
from splitserve.cluster.placement import available_cores
from splitserve.config.cluster import ClusterConfig
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from tests.support.waiting import PATIENCE_S

PROGRAM = """
import sys
from splitserve.cluster.compute_threads import set_compute_threads, set_spins
set_compute_threads(3)
set_spins(pinned="pinned" in sys.argv)
import torch
"""


OWN = tuple(available_cores())
"""All that this process has, so that pinning to them changes nothing."""
ENVIRONMENT = "splitserve.cluster.compute_threads.os.environ"


@pytest.mark.parametrize(
    ("kind", "cpus", "spins"),
    [("torch", (), "1000"), ("torch", OWN, "20000"), ("simulated", (), "1000"), ("vllm", (), None)],
)
def test_workers_set_it_before_anything_computes_but_for_vllm(
    kind: str, cpus: tuple[int, ...], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables: dict[str, str] = {}
    monkeypatch.setattr(ENVIRONMENT, variables)
    engine = EngineConfig.model_validate({"kind": kind, "threads": 2})
    services._claim_cores(WorkerConfig(worker_id="w", model="m", engine=engine, cpus=cpus))
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize(("pinned", "spins"), [(True, "20000"), (False, "1000")])
def test_what_workers_are_forked_from_sets_it_before_it_imports(
    pinned: bool, spins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables: dict[str, str] = {}
    monkeypatch.setattr(ENVIRONMENT, variables)
    asked: list[Step] = []
    monkeypatch.setattr(ForkServer, "start", lambda steps, run: asked.extend(steps))
    fork_services(ClusterConfig(pin_cores=pinned), lambda arguments: 0)
    first = asked[0]
    assert callable(first)
    first()
    assert variables == {"GOMP_SPINCOUNT": spins}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="only there")
@pytest.mark.parametrize(
    ("given", "arguments", "spins"),
    [
        ({}, [], "1000"),
        ({}, ["pinned"], "20000"),
        ({"GOMP_SPINCOUNT": "77"}, ["pinned"], "77"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, [], "0"),
    ],
)
def test_threads_spin_so_long_unless_the_environment_says_how_long(
    given: Mapping[str, str], arguments: list[str], spins: str
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
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
