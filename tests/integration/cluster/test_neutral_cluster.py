"""`splitserve up --workers N`: neutral workers behind a real coordinator."""

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

from engine.runner.simulated_runner import expected_tokens
from splitserve.client import AsyncClient
from splitserve.security.certificates import write_certificates
from splitserve.security.tls import files_in
from tests.support.cluster.real_cluster import held_resources
from tests.support.cluster.streams import tokens
from tests.support.waiting import PATIENCE_S

SPLITSERVE = [sys.executable, "-m", "splitserve"]

pytestmark = pytest.mark.timeout(240)


@contextmanager
def neutral_cluster(*options: str) -> Iterator[str]:
    """Two neutral workers of simulated engines; the address of the coordinator."""
    command = [*SPLITSERVE, "up", "--workers", "2", "--engine", "simulated", *options]
    command += ["--grpc-port", "0", "--http-port", "off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith("splitserve ready on "))
        assert "2 neutral workers" in ready
        yield ready.split()[3]
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(PATIENCE_S)
    assert code == 0


async def test_up_serves_with_neutral_workers() -> None:
    with neutral_cluster() as target:
        prompts = [tokens(40 + 9 * n, n) for n in range(16)]
        async with AsyncClient(target) as client:
            answers = await asyncio.gather(*(client.generate(p, max_tokens=12) for p in prompts))
            assert [list(answer.token_ids) for answer in answers] == [expected_tokens(p, 12) for p in prompts]
            deadline = time.monotonic() + PATIENCE_S
            while held := held_resources(info := await client.server_info()):
                assert time.monotonic() < deadline, f"leaked: {held}"
                await asyncio.sleep(0.05)
        assert sorted(worker.worker_id for worker in info.workers) == ["worker-0", "worker-1"]
        assert {worker.pool for worker in info.workers} <= {"prefill", "decode"}
        command = [*SPLITSERVE, "generate", "hello", "--target", target, "--max-tokens", "5", "--json"]
        told = await asyncio.to_thread(subprocess.check_output, command, timeout=PATIENCE_S)
        assert len(json.loads(told)["token_ids"]) == 5


async def test_with_certificates_of_their_role(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["127.0.0.1"], 30)
    for role in ("prefill", "decode"):  # nobody here needs them
        files = files_in(tmp_path, role)
        assert files.key is not None
        files.key.unlink()
    with neutral_cluster("--tls", str(tmp_path)) as target:
        prompt = tokens(50, 1)
        async with AsyncClient(target, tls=files_in(tmp_path, "client")) as client:
            answer = await client.generate(prompt, max_tokens=8)
        assert list(answer.token_ids) == expected_tokens(prompt, 8)


def test_workers_beside_pools_are_one_line() -> None:
    command = [*SPLITSERVE, "up", "--workers", "2", "--prefill", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode != 0
    assert "workers: 2 neutral workers and prefill at once" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
