"""`splitserve record` on running clusters: what it writes, what `splitserve advise` makes of it, who may."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from autoscaler.simulation.traces.trace import load_trace
from splitserve.client.traffic_client import RecordingPlan, TrafficClient
from splitserve.errors import PermissionDeniedError, UnauthenticatedError
from splitserve.security.api_keys import key_hash, new_key
from tests.support.clients.patient import PatientClient
from tests.support.cluster.ports import free_port
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = (sys.executable, "-m", "splitserve")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def run(target: str, command: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code and output."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        command, *arguments, stdout=pipe, stderr=pipe, cwd=ROOT,
        env=os.environ | {"SPLITSERVE_TARGET": target},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode is not None
    assert b"Traceback" not in err
    return process.returncode, out.decode(), err.decode()


async def load(target: str, *, key: str | None = None) -> None:
    async with PatientClient(target, timeout_s=PATIENCE_S, api_key=key) as client:
        for number in itertools.count():  # no prompt is in a cache, so that all of it is computed
            prompt = [number % 250, number // 250, *[7] * 598]
            await client.generate(prompt, max_tokens=4, ignore_eos=True)


async def test_a_recording_of_a_busy_cluster(log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "traffic.jsonl"
    async with running(Cluster(log_dir)) as cluster:
        busy = asyncio.create_task(load(cluster.target))
        try:
            code, told, err = await run(
                cluster.target, "record", "--seconds", "5", "--drain", "60", "--out", str(out), "--json"
            )
            assert (code, err) == (0, "")
            again = await run(cluster.target, "record", "--seconds", "1", "--out", str(out))
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
    await advises(out)
    assert [one.arrival_s * 1e3 + ordered[0] for one in trace.requests] == pytest.approx(ordered)


async def advises(recording: Path) -> None:
    """The engine model comes from the recording's own reports; what was achieved, from its measured times."""
    saved = recording.with_name("advice.json")
    options = ("--trace", str(recording), "--ttft-ms", "60000", "--tpot-ms", "60000")
    code, told, err = await run("", "advise", *options, "--budget", "3", "--json", "--save", str(saved))
    assert (code, err) == (0, "")
    found = json.loads(told)
    # A simulated engine: 2 ms a step and 20 us a prompt token, and what the machine adds. Prompts of one length do not
    # tell how much of it each token takes.
    prompt_s = 600 * found["engine"]["prefill_token_s"] + found["engine"]["prefill_step_s"]
    assert 2e-3 < prompt_s < 6.0
    assert found["engine"]["step_s"] + found["engine"]["sequence_s"] > 1e-3
    assert found["best"]["attainment"] == 1.0
    assert {one["candidate"]["kind"] for one in found["candidates"]} == {"split", "colocated", "adaptive"}
    code, told, err = await run("", "advise", *options)
    assert (code, err) == (0, "")
    assert "\x1b" not in told
    assert "Take " in told
    assert "Apply: splitserve up" in told
    code, told, err = await run("", "advise", "--trace", str(recording), "--check", str(saved))
    assert (code, err) == (0, "")
    assert "100.0% achieved" in told


def shape(one: dict[str, Any]) -> bool:
    assert (one["input_length"], one["output_length"], one["outcome"]) == (600, 4, "completed")
    assert len(one["hash_ids"]) == 2
    assert 0 <= one["timestamp"] < 5000
    assert one["ttft_ms"] > 0
    assert one["prefill_compute_ms"] > 0
    return True


async def test_wrong_input_gives_one_line(tmp_path: Path) -> None:
    out, nobody = str(tmp_path / "out.jsonl"), f"127.0.0.1:{free_port()}"
    for arguments, code in (
        (("record", "--out", out), 1),
        (("record", "--out", str(tmp_path / "none" / "x")), 2),
        (("record", "--out", out, "--seconds", "0"), 2),
        (("advise",), 2),
        (("advise", "--live", "--trace", out), 2),
        (("advise", "--trace", str(tmp_path / "none")), 2),
        (("advise", "--trace", out, "--budget", "1"), 2),
    ):
        got, said, err = await run(nobody, *arguments)
        assert (got, said) == (code, ""), (arguments, err)
        assert err


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
