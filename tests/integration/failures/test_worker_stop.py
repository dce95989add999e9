"""SIGTERM ends a worker and an autoscaler whatever their libraries do, without their children, and loses nothing that
is being written."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.cluster.processes import ServiceProcess
from tests.support.waiting import LEAST_TIMEOUT_S

pytestmark = pytest.mark.timeout(LEAST_TIMEOUT_S)

STUCK = "tests.support.stuck_services"
WORKER = ["decode-worker", "--engine", "simulated", "--model", "simulated", "--coordinator", "127.0.0.1:1"]
POLICY = "{prefill: {target_ms: 60000}, decode: {target_ms: 60000}}"
PROMPTS, BLOCK_TOKENS = 3, 16
ENDED = "1: it was ended after END_S"


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("kind", ["worker", "autoscaler"])
def test_what_hangs_at_a_process_end_holds_up_no_stop(kind: str, log_dir: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    scaling = ["autoscaler", "--policy", str(policy), "--coordinator", "127.0.0.1:1"]
    command = ["exit", *(WORKER if kind == "worker" else scaling)]
    process = ServiceProcess(kind, command, log_dir, module=STUCK)
    process.start()
    try:
        process.wait_event(f"{kind}.ready")
        child = process.wait_event("test.child")["pid"]
        assert process.terminate() == 0, ENDED
    finally:
        process.kill()
    assert process.events()[-1]["event"] == f"{kind}.stopped"
    assert not runs(child)


def test_a_start_of_vllm_that_hangs_ends_with_its_processes(log_dir: Path) -> None:
    model = ["--engine", "vllm", "--model", "any-folder"]
    command = ["start", "decode-worker", *model, "--coordinator", "127.0.0.1:1"]
    process = ServiceProcess("worker", command, log_dir, module=STUCK)
    process.start()
    try:
        child = process.wait_event("test.child")["pid"]
        assert process.terminate() == 0, ENDED
    finally:
        process.kill()
    assert [entry["event"] for entry in process.events()][-2:] == ["process.stopped_at_start", "test.removed"]
    assert not runs(child)
