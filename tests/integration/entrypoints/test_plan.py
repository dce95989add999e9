"""`splitserve plan` with the engine that a recording of a real cluster describes, and a log of another form."""

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
OPTIONS = ("--dtype", "float32")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def program(*arguments: str) -> str:
    """The output of a command that succeeds."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "splitserve", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, cwd=ROOT)
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_a_plan_from_what_real_workers_measured(log_dir: Path, tmp_path: Path, smollm2: str) -> None:
    recording, log = tmp_path / "recording.jsonl", tmp_path / "log.csv"
    cluster = Cluster(log_dir, model=smollm2, engine="torch", worker_options=OPTIONS)
    async with running(cluster), PatientClient(cluster.target, timeout_s=PATIENCE_S) as client:
        wanted = ("record", "--target", cluster.target, "--seconds", "5", "--out", str(recording), "--json")
        async with asyncio.timeout(PATIENCE_S):
            await client.generate([5] * 20, max_tokens=4, ignore_eos=True)
            recorder = asyncio.create_task(program(*wanted))
            while not recording.exists():  # noqa: ASYNC110 - the recording begins at once then
                await asyncio.sleep(0.05)
            number = 0
            while number < REQUESTS or not recorder.done():
                prompt = [7 + number, 8, 9] * (10 + 5 * (number % REQUESTS))
                await client.generate(prompt, max_tokens=8, ignore_eos=True)
                number += 1
        assert json.loads(await recorder)["recorded"] > 0
        await cluster.assert_no_leaks()
    log.write_text("at;in;out\n" + "".join(f"{number * 5000};90;8\n" for number in range(40)))
    columns = "timestamp=at,input_length=in,output_length=out,unit=ms"
    slow = ("--slo-ttft", "60000", "--slo-tpot", "60000", "--json")
    found = json.loads(
        await program(
            "plan", "--engine-model", str(recording), "--trace", str(log), "--columns", columns, *slow
        )
    )
    engine = found["replica"]["engine"]
    assert engine["step_s"] + engine["sequence_s"] > 1e-4
    assert engine["prefill_token_s"] + engine["prefill_step_s"] > 1e-5
    assert found["traffic"] == {
        "requests_per_second": pytest.approx(40 / 195, rel=1e-3),
        "mean_prompt_tokens": 90,
        "mean_output_tokens": 8,
        "requests": 40,
    }
    assert found["split"]["name"] == "1P:1D"
    assert found["best"] == "colocated"
