"""`splitserve top` on running clusters: piped, as JSON, of several coordinators, and with one that is away."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.patient import PatientClient
from tests.support.cluster.ports import free_port
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
TOP = (sys.executable, "-m", "launcher", "top", "--interval", "0.5")

pytestmark = pytest.mark.timeout(240)


async def top(target: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code and output, while the cluster answers one request after the other."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *TOP, *arguments, stdout=pipe, stderr=pipe, cwd=ROOT, env=os.environ | {"SPLITSERVE_TARGET": target}
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode is not None
    assert b"Traceback" not in err
    return process.returncode, out.decode(), err.decode()


async def load(target: str) -> None:
    async with PatientClient(target, timeout_s=PATIENCE_S) as client:
        number = 0
        while True:
            number += 1
            await client.generate([number % 250, 7, 8, 9], max_tokens=4)


async def once(target: str, holds: Callable[[str], Any], *arguments: str) -> str:
    """The output as soon as this holds of it: a busy machine may answer nothing in half a second."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        code, out, err = await top(target, *arguments)
        if (code, err) == (0, "") and holds(out):
            return out
        assert time.monotonic() < deadline, (code, out, err)


def models_of(out: str) -> list[dict[str, Any]]:
    """Of the second of two readings."""
    readings = [json.loads(line) for line in out.splitlines()]
    assert len(readings) == 2
    return list(readings[1]["models"])


def measured(out: str) -> bool:
    """Whether requests came and ended between two readings, and not only the first of a worker, which are cold."""
    (model,) = models_of(out)
    rates = model["requests_per_s"], model["outcomes_per_s"].get("completed")
    return all(rates) and None not in (model["ttft"]["p50_ms"], model["tpot"]["p50_ms"])


async def test_a_busy_cluster(log_dir: Path) -> None:
    options = ["--slow-ttft", "0.000001"]
    words = ("requests/s", "decode-1", "within target", "slow requests", "no answer from")
    async with running(Cluster(log_dir, prefill=1, decode=2, coordinator_options=options)) as cluster:
        busy = asyncio.create_task(load(cluster.target))
        try:
            out = await once(cluster.target, measured, "--json", "--count", "2")
            (model,) = models_of(out)
            assert model["model"] == "simulated"
            assert model["requests_per_s"] > 0
            assert model["outcomes_per_s"]["completed"] > 0
            assert 0 < model["ttft"]["p50_ms"] <= model["ttft"]["p99_ms"]
            assert [worker["worker_id"] for worker in model["workers"]] == [
                "decode-0",
                "decode-1",
                "prefill-0",
            ]
            assert json.loads(out.splitlines()[1])["slow_requests"]
            both = f"{cluster.target},127.0.0.1:{free_port()}"
            out = await once(both, lambda out: all(word in out for word in words))
            assert "\x1b" not in out
            assert all(len(line) <= 120 for line in out.splitlines()), out
        finally:
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
        await cluster.assert_no_leaks()


async def test_on_a_terminal_it_goes_on_until_it_is_interrupted(log_dir: Path) -> None:
    async with running(Cluster(log_dir)) as cluster:
        master, slave = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            *TOP, stdin=slave, stdout=slave, stderr=asyncio.subprocess.PIPE,
            cwd=ROOT, env=os.environ | {"SPLITSERVE_TARGET": cluster.target, "TERM": "xterm"},
        )  # fmt: skip
        os.close(slave)
        seen = b""
        try:
            while seen.count(b"prefill-0") < 2:
                seen += await asyncio.wait_for(asyncio.to_thread(os.read, master, 65536), PATIENCE_S)
            process.send_signal(2)
            reading = asyncio.create_task(asyncio.to_thread(_drain, master))
            _, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
            await reading
        finally:
            os.close(master)
        assert process.returncode == 0
        assert b"Traceback" not in err


def _drain(terminal: int) -> None:
    """Reads until the other end is closed: a program that writes to a full terminal would wait for its reader."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        pass


async def test_wrong_input_gives_one_line() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    for arguments, code in (((), 1), (("--interval", "0"), 2), (("--count", "0"), 2), (("--ttft", "-1"), 2)):
        got, out, err = await top(nobody, *arguments)
        assert (got, out) == (code, ""), arguments
        assert err
