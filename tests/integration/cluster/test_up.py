"""`splitserve up` with real services: ready line, answers, status, Ctrl-C drains, wrong settings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.support.waiting import PATIENCE_S

SPLITSERVE = [sys.executable, "-m", "launcher"]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def cluster() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command and the address of its ready line."""
    command = [*SPLITSERVE, "up", "--engine", "simulated", "--decode", "2", "--grpc-port", "0"]
    command += ["--http-port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith("splitserve ready on "))
        assert "1 prefill + 2 decode" in ready
        yield process, ready.split()[3]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)


def test_the_simulated_model_needs_neither_files_nor_the_network() -> None:
    command = [*SPLITSERVE, "up", "--model", "simulated", "--grpc-port", "0", "--http-port", "off"]
    nowhere = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": "0"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=nowhere
    )
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith("splitserve ready on "))
        assert " simulated " in ready
        assert splitserve("generate", "Hello", "--max-tokens", "3", "--target", ready.split()[3])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)


def splitserve(*arguments: str) -> str:
    command = [*SPLITSERVE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout


def test_up_serves_and_ctrl_c_ends_everything(cluster: tuple[subprocess.Popen[str], str]) -> None:
    process, target = cluster
    answer = json.loads(splitserve("generate", "hello", "--target", target, "--max-tokens", "5", "--json"))
    assert set(answer) >= {"text", "token_ids", "finish_reason", "usage", "timings", "served_by"}
    phases = {"queue_ms", "prefill_ms", "transfer_ms", "decode_admit_ms", "ttft_ms", "tpot_ms"}
    assert set(answer["timings"]) >= phases
    assert answer["served_by"]["transport"] == "nixl"
    assert len(answer["token_ids"]) == 5
    streamed = splitserve("generate", "hello", "--target", target, "--max-tokens", "5")
    assert streamed.strip() == answer["text"].strip()
    workers = json.loads(splitserve("status", "--target", target, "--json"))["workers"]
    assert sorted(worker["worker_id"] for worker in workers) == ["decode-0", "decode-1", "prefill-0"]
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
    psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not [child for child in children if child.is_running()]
