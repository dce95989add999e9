"""`splitserve up --workers N`: workers of role both behind a real coordinator."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.client.scaling_client import ScalingClient
from splitserve.roles import RoleName
from splitserve.rpc.credentials import ClusterCredentials
from splitserve.security.certificates import write_certificates
from splitserve.security.tls import files_in
from tests.support.cluster.real_cluster import held_resources
from tests.support.cluster.streams import tokens
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S

TOKEN = "a-token-of-the-cluster"
SPLITSERVE = [sys.executable, "-m", "launcher"]

pytestmark = pytest.mark.timeout(240)


@contextmanager
def cluster_of_both(*options: str, workers: int = 2) -> Iterator[str]:
    """Workers of role both of simulated engines; the address of the coordinator."""
    command = [*SPLITSERVE, "up", "--workers", str(workers), "--engine", "simulated", *options]
    command += ["--grpc-port", "0", "--http-port", "off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith("splitserve ready on "))
        assert f"{workers} workers of role both" in ready
        yield ready.split()[3]
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(PATIENCE_S)
    assert code == 0


async def test_up_serves_with_workers_of_role_both() -> None:
    with cluster_of_both() as target:
        prompts = [tokens(40 + 9 * n, n) for n in range(16)]
        async with AsyncClient(target) as client:
            answers = await asyncio.gather(*(client.generate(p, max_tokens=12) for p in prompts))
            assert [list(answer.token_ids) for answer in answers] == [expected_tokens(p, 12) for p in prompts]
            deadline = time.monotonic() + PATIENCE_S
            while held := held_resources(info := await client.server_info()):
                assert time.monotonic() < deadline, f"leaked: {held}"
                await asyncio.sleep(0.05)
        assert sorted(worker.worker_id for worker in info.workers) == ["worker-0", "worker-1"]
        assert {worker.role for worker in info.workers} == {"both"}
        command = [*SPLITSERVE, "generate", "hello", "--target", target, "--max-tokens", "5", "--json"]
        told = await asyncio.to_thread(subprocess.check_output, command, timeout=PATIENCE_S)
        assert len(json.loads(told)["token_ids"]) == 5


async def test_roles_change_under_load_and_no_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn moves one worker from one pool to the other, and requests that meet it meanwhile go elsewhere."""
    names = ("worker-0", "worker-1", "worker-2")
    turns: list[tuple[RoleName, RoleName, RoleName]] = [
        ("prefill", "decode", "both"),
        ("prefill", "both", "decode"),
        ("both", "prefill", "decode"),
        ("decode", "prefill", "both"),
        ("decode", "both", "prefill"),
        ("both", "decode", "prefill"),
    ]
    over = asyncio.Event()

    async def load(client: AsyncClient, lane: int) -> int:
        count = 0
        while not over.is_set():
            prompt = tokens(30 + 7 * lane, 1000 * lane + count)
            answer = await client.generate(prompt, max_tokens=8)
            assert list(answer.token_ids) == expected_tokens(prompt, 8)
            count += 1
        return count

    monkeypatch.setenv("SPLITSERVE_CLUSTER_TOKEN", TOKEN)
    with cluster_of_both(workers=3) as target:
        plans = ScalingClient(target, timeout_s=PATIENCE_S, security=ClusterCredentials(token=TOKEN))
        async with AsyncClient(target) as client, plans as scaling:
            loads = [asyncio.create_task(load(client, lane)) for lane in range(1, 5)]
            for turn in range(18):
                wanted = dict(zip(names, turns[turn % len(turns)], strict=True))
                await scaling.apply_plan(roles=wanted)
                deadline = time.monotonic() + PATIENCE_S
                while {w.worker_id: w.role for w in (await client.server_info()).workers} != wanted:
                    assert time.monotonic() < deadline, f"the workers do not take {wanted}"
                    await asyncio.sleep(0.01)
            over.set()
            assert sum(await asyncio.gather(*loads)) >= 18
            info = await client.server_info()
            assert {worker.circuit for worker in info.workers} == {"closed"}


async def test_with_certificates(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["127.0.0.1"], 30)
    with cluster_of_both("--tls", str(tmp_path)) as target:
        prompt = tokens(50, 1)
        async with AsyncClient(target, tls=files_in(tmp_path, "client")) as client:
            answer = await client.generate(prompt, max_tokens=8)
        assert list(answer.token_ids) == expected_tokens(prompt, 8)


def test_workers_beside_pools_are_one_line() -> None:
    command = [*SPLITSERVE, "up", "--workers", "2", "--prefill", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode != 0
    assert "workers: 2 workers of role both and prefill at once" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
