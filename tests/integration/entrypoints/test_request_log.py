"""`--request-log` of a running cluster: a line a request; `splitserve plan` reads it and what the workers measured."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.support.clients.patient import PatientClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
REQUESTS = 12
PROMPT = 1100
SLOW = ("--slo-ttft", "60000", "--slo-tpot", "60000", "--json")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def planned(*arguments: str) -> dict[str, object]:
    """What `splitserve plan` says."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "launcher", "plan", *arguments, *SLOW)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, cwd=ROOT)
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0, err.decode()
    found: dict[str, object] = json.loads(out)
    return found


async def test_requests_are_logged_and_planned_for(log_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    cluster = Cluster(log_dir, coordinator_options=("--request-log", str(log)))
    async with running(cluster), PatientClient(cluster.target, timeout_s=PATIENCE_S) as client:
        for number in range(REQUESTS):
            prompt = [*[7] * 512, number, *[9] * (PROMPT - 513)]
            await client.generate(prompt, max_tokens=8, ignore_eos=True)
        await cluster.assert_no_leaks()
        found = await planned("--target", cluster.target, "--trace", str(log))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == REQUESTS
    for line in lines:
        assert (line["prompt_tokens"], line["output_tokens"], line["outcome"]) == (PROMPT, 8, "completed")
        assert line["ttft_s"] > 0
        assert line["tpot_s"] > 0
        assert line["phases_s"]["prefill_compute"] > 0
        assert len(line["prefix_hashes"]) == PROMPT // 512
    firsts, seconds = ({line["prefix_hashes"][place] for line in lines} for place in (0, 1))
    assert (len(firsts), len(seconds)) == (1, REQUESTS)
    assert found["best"] == "colocated"
    replica = found["replica"]
    assert isinstance(replica, dict)
    assert replica["engine"]["decode"]["base_s"] + replica["engine"]["decode"]["sequence_s"] > 1e-4
    assert replica["engine"]["prefill"]["token_s"] > 1e-6
