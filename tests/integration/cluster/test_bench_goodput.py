"""The goodput bench runs from end to end, goes on where it was stopped, and leaves no server behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-m", "bench.goodput")
HANGING_SERVER = """#!/bin/sh
sleep 1000 &
sleep 1000
"""
"""In place of vLLM's Python: it never becomes ready, and its child does not end with it."""


def result_of(*options: str, systems: int) -> dict[str, Any]:
    ended = subprocess.run(
        [*COMMAND, *options, "--json"], capture_output=True, timeout=systems * PATIENCE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def check(report: dict[str, Any], systems: tuple[str, ...], requests: int) -> None:
    assert {"date", "command", "machine", "targets", "rows", "differences", "goodput"} <= set(report)
    assert [row["system"] for row in report["rows"]] == list(systems)
    for row in report["rows"]:
        assert (row["mix"], row["rate"], row["seeds"], row["requests"]) == ("measured", 2.0, 1, requests)
        assert 0 <= row["attained"] <= 1
        assert row["low"] is None
        assert row["high"] is None
        assert row["complete"] + row["refused"] + row["failed"] + row["timed_out"] == requests
        assert row["failed"] == 0
        assert row["attained"] <= row["complete"] / requests
        assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"]
        assert 0 < row["tpot_p50_s"] <= row["tpot_p95_s"]
        assert row["core_speed_mb_per_s"] > 0
        assert set(report["goodput"]["measured"][row["system"]]) == {"rate", "tried", "bound"}
    assert {one["against"] for one in report["differences"]} >= set(systems[1:])


@pytest.mark.timeout(3 * PATIENCE_S)
def test_one_json_object_and_no_run_twice(tmp_path: Path) -> None:
    quick = ("--quick", "--model", "simulated", "--requests", "5", "--runs", str(tmp_path / "runs.jsonl"))
    systems = ("default", "split")
    report = result_of(*quick, "--systems", *systems, systems=len(systems))
    check(report, systems, 5)
    again = result_of(*quick, "--systems", *systems, systems=len(systems))
    assert again["rows"] == report["rows"]
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 2


@contextmanager
def begun(*options: str) -> Iterator[psutil.Popen]:
    """The bench, running; what is left of it is killed in the end."""
    process = psutil.Popen(
        [*COMMAND, "--mixes", "measured", "--rates", "1", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        for one in [*process.children(recursive=True), process] if process.is_running() else []:
            one.kill()
        process.wait(PATIENCE_S)


def until_serving(process: psutil.Popen, named: str, count: int) -> list[psutil.Process]:
    """All processes below the bench, once so many of them have this in their command."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        family: list[psutil.Process] = process.children(recursive=True)
        if sum(named in " ".join(_command(one)) for one in family) >= count:
            return family
        time.sleep(0.05)
    raise TimeoutError(f"never {count} processes of {named!r}")


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def alive(family: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in family if _is_alive(one)]


def _is_alive(one: psutil.Process) -> bool:
    try:
        return bool(one.is_running() and one.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it has just ended
        return False


def all_end(family: list[psutil.Process]) -> bool:
    """Whether all end: who was killed is there for a moment longer."""
    deadline_s = time.monotonic() + PATIENCE_S
    while alive(family) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not alive(family)


@pytest.mark.timeout(LEAST_TIMEOUT_S)
def test_a_server_that_hangs_ends_with_an_interrupted_bench(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(HANGING_SERVER)
    python.chmod(0o755)
    with begun("--systems", "vllm", "--environment", str(tmp_path)) as process:
        family = until_serving(process, "sleep 1000", 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert all_end(family)


@pytest.mark.timeout(LEAST_TIMEOUT_S)
def test_a_cluster_under_load_ends_with_a_stopped_bench() -> None:
    with begun("--systems", "default", "--model", "simulated") as process:
        family = until_serving(process, "bench.goodput.generator", 1)
        assert sum("worker" in " ".join(_command(one)) for one in family) >= 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 130
        assert all_end(family)


@pytest.mark.timeout(LEAST_TIMEOUT_S)
def test_a_server_that_cannot_start_is_told(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *COMMAND,
            "--systems",
            "vllm",
            "--environment",
            str(tmp_path),
            "--mixes",
            "measured",
            "--rates",
            "1",
        ],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert b"error:" in ended.stderr
