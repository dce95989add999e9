"""`splitserve autoscaler` beside a running cluster: it looks, decides and logs; it ends on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster
from tests.support.cluster.streams import eventually
from tests.support.waiting import PATIENCE_S

POLICY = "{interval_s: 0.2, prefill: {target_ms: 60000}, decode: {target_ms: 60000}}"
"""Targets that no machine misses: one replica of each is enough however busy it is."""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def autoscaler(simulated_cluster: Cluster, policy: Path, tmp_path: Path) -> Iterator[ServiceProcess]:
    options = ["--policy", str(policy), "--coordinator", simulated_cluster.target, "--metrics-port", "0"]
    options += ["--window", "1"]
    process = ServiceProcess("autoscaler", ["autoscaler", *options], tmp_path)
    process.start()
    yield process
    assert process.terminate() == 0
    assert process.events()[-1]["event"] == "autoscaler.stopped"


async def test_it_sees_the_cluster_and_acts_on_nothing(autoscaler: ServiceProcess) -> None:
    decided = autoscaler.wait_event("scaling.decided")
    assert decided["replicas"] == {"ready": 1}
    assert decided["dry_run"] is True
    port = autoscaler.wait_event("metrics.ready")["port"]

    def shown() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
            return str(page.read().decode())

    for line in (
        'splitserve_autoscaler_replicas{pool="prefill",state="ready"} 1.0',
        'splitserve_autoscaler_desired_replicas{pool="decode"} 1.0',
    ):
        await eventually(lambda line=line: line in shown(), line)  # type: ignore[misc]


async def test_it_explains_its_decisions(simulated_cluster: Cluster, autoscaler: ServiceProcess) -> None:
    target = f"127.0.0.1:{autoscaler.wait_event('metrics.ready')['port']}"

    async def explained() -> dict[str, Any]:
        command = [sys.executable, "-m", "launcher", "autoscaler", "explain", "--target", target]
        done = await asyncio.create_subprocess_exec(
            *command, "--json", "--last", "240", stdout=subprocess.PIPE
        )
        said, _ = await asyncio.wait_for(done.communicate(), PATIENCE_S)
        assert done.returncode == 0
        found: dict[str, Any] = json.loads(said)
        return found

    def measured(page: dict[str, Any]) -> dict[str, Any] | None:
        """A decision by the speed of answers."""
        for one in page["decisions"]:
            if one["pools"]["decode"]["inputs"]["tpot_p95_s"] is not None:
                return dict(one)
        return None

    async with simulated_cluster.client() as client:
        async with asyncio.timeout(PATIENCE_S):
            # Those of a worker's first requests are left out as cold.
            while (one := measured(await explained())) is None:
                await asyncio.gather(*(client.generate([7] * 40, max_tokens=8) for _ in range(8)))
    decode = one["pools"]["decode"]
    assert (decode["ready"], decode["desired"]) == (1, 1)
    assert decode["inputs"]["replica_kv_tokens"] > 0
    assert not one["acted"]


def test_a_hangup_reads_the_policy_again_and_a_wrong_one_changes_nothing(
    autoscaler: ServiceProcess, policy: Path
) -> None:
    autoscaler.wait_event("scaling.decided")
    autoscaler.signal(signal.SIGHUP)
    assert autoscaler.wait_event("file.reloaded")["file"] == "policy"
    assert "policy.reloaded" not in [one["event"] for one in autoscaler.events()], "it says what it said"
    policy.write_text(POLICY.replace("0.2", "soon"))
    autoscaler.signal(signal.SIGHUP)
    assert "interval_s" in autoscaler.wait_event("file.rejected")["error"]
    assert autoscaler.wait_event("scaling.failed")["hop"] == "policy"
    policy.write_text(POLICY.replace("target_ms: 60000}}", "target_ms: 50000}}"))
    assert autoscaler.wait_event("policy.reloaded"), "an edit is taken without a signal, too"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "error: policy: Field required"),
        (["--policy", "POLICY", "--lease", "0"], "error: lease_s: "),
        (["--policy", "POLICY", "--actuator", "magic"], "error: actuator: "),
        (["--policy", "/nowhere.yaml"], "error: "),
        (
            ["--policy", "POLICY", "--docker-hosts", "hosts.yaml"],
            "error: docker.hosts (--docker-hosts) needs actuator (--actuator) docker, not none",
        ),
    ],
)
def test_wrong_settings_end_it_with_one_line(policy: Path, options: list[str], said: str) -> None:
    given = [str(policy) if option == "POLICY" else option for option in options]
    command = [sys.executable, "-m", "launcher", "autoscaler", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(said), done.stderr
