"""`splitserve record` on running clusters: what it writes, that the simulator reads it, who may."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from autoscaler.simulation.traces.trace import load_trace
from splitserve.client import AsyncClient
from splitserve.client.traffic_client import RecordingPlan, TrafficClient
from splitserve.errors import PermissionDeniedError, UnauthenticatedError
from splitserve.security.api_keys import key_hash, new_key
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
RECORD = (sys.executable, "-m", "splitserve", "record")

pytestmark = pytest.mark.timeout(240)


async def record(target: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code and output."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *RECORD, *arguments, stdout=pipe, stderr=pipe, cwd=ROOT,
        env=os.environ | {"SPLITSERVE_TARGET": target},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode is not None
    assert b"Traceback" not in err
    return process.returncode, out.decode(), err.decode()


async def load(target: str, *, key: str | None = None) -> None:
    async with AsyncClient(target, timeout_s=PATIENCE_S, api_key=key) as client:
        while True:
            await client.generate([11, 7, 8, 9] * 150, max_tokens=4, ignore_eos=True)


async def test_a_recording_of_a_busy_cluster(log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "traffic.jsonl"
    async with running(Cluster(log_dir)) as cluster:
        busy = asyncio.create_task(load(cluster.target))
        try:
            code, told, err = await record(
                cluster.target, "--seconds", "5", "--drain", "60", "--out", str(out), "--json"
            )
            assert (code, err) == (0, "")
            again = await record(cluster.target, "--seconds", "1", "--out", str(out))
            assert again[0] == 1
            assert "--force" in again[2]
        finally:
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
        await cluster.assert_no_leaks()
    found = json.loads(told)
    head, *requests, end = [json.loads(line) for line in out.read_text().splitlines()]
    assert (head["recording"], head["block_tokens"]) == (1, 512)
    assert found["recorded"] == len(requests) > 0
    assert (found["lost"], found["unfinished"]) == (0, 0)
    assert all(shape(one) for one in requests)
    assert {worker["pool"] for worker in end["workers"]} == {"prefill", "decode"}
    assert all(worker["max_step_tokens"] > 0 for worker in end["workers"])
    trace = load_trace(out)
    assert len(trace.requests) == len(requests)
    assert trace.requests[0].block_ids == tuple(requests[0]["hash_ids"])
    ordered = sorted(one["timestamp"] for one in requests)
    assert [one.arrival_s * 1e3 + ordered[0] for one in trace.requests] == pytest.approx(ordered)


def shape(one: dict[str, Any]) -> bool:
    assert (one["input_length"], one["output_length"], one["outcome"]) == (600, 4, "completed")
    assert len(one["hash_ids"]) == 2
    assert 0 <= one["timestamp"] < 5000
    assert one["ttft_ms"] > 0
    assert one["prefill_compute_ms"] > 0
    return True


async def test_recording_is_for_operators(log_dir: Path, tmp_path: Path) -> None:
    admin, user = new_key(), new_key()
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(
        "tenants:\n"
        f"  - {{name: ops, admin: true, key_hashes: ['{key_hash(admin)}']}}\n"
        f"  - {{name: alice, key_hashes: ['{key_hash(user)}']}}\n"
    )
    options = ["--tenants", str(tenants)]
    async with running(Cluster(log_dir, coordinator_options=options, api_key=admin)) as cluster:
        for key, error in ((None, UnauthenticatedError), (user, PermissionDeniedError)):
            client = TrafficClient(cluster.target, api_key=key)
            with pytest.raises(error):
                await client.record(RecordingPlan(b"s" * 16, 1.0), lambda _request, _at_s: None)
        mine = TrafficClient(cluster.target, api_key=admin)
        await mine.record(RecordingPlan(b"s" * 16, 0.1), lambda _request, _at_s: None)
        assert mine.tally.since_s is not None
        await cluster.assert_no_leaks()
