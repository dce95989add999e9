"""SIGTERM ends a worker and an autoscaler whatever their libraries do, without their children, and loses nothing that
is being written."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

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
    policy, history = tmp_path / "policy.yaml", tmp_path / "history.json"
    policy.write_text(POLICY)
    scaling = ["autoscaler", "--policy", str(policy), "--coordinator", "127.0.0.1:1"]
    scaling += ["--history-file", str(history)]
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
    assert history.exists() == (kind == "autoscaler")


def test_a_start_of_vllm_that_hangs_ends_with_its_processes(log_dir: Path) -> None:
    command = ["start", *WORKER, "--engine", "vllm"]
    process = ServiceProcess("worker", command, log_dir, module=STUCK)
    process.start()
    try:
        child = process.wait_event("test.child")["pid"]
        assert process.terminate() == 0, ENDED
    finally:
        process.kill()
    assert [entry["event"] for entry in process.events()][-2:] == ["process.stopped_at_start", "test.removed"]
    assert not runs(child)


async def test_what_a_disk_tier_still_has_to_write_is_written(log_dir: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    options = ["--kv-disk-tier-path", str(tmp_path / "kv"), "--kv-disk-tier-bytes", str(2**22)]
    options += ["--kv-host-tier-bytes", str(2**22)]
    async with running(Cluster(log_dir)) as cluster:
        gated = (*options, str(gate))
        worker = cluster.add_worker("prefill", "first", *gated, module="tests.support.tiers.gated_disk")
        await cluster.wait_ready(prefill=2)
        cluster.members["prefill-0"].terminate()
        async with cluster.client() as client:
            for number in range(PROMPTS):
                await client.generate([number, *range(100)], model="simulated", max_tokens=2)
        worker.signal(signal.SIGTERM)
        worker.wait_event("worker.draining")
        opener = threading.Thread(target=lambda: gate.open("w").close())
        opener.start()
        assert worker.process.wait(PATIENCE_S) == 0
        opener.join()
        again = cluster.add_worker("prefill", "again", *options)
        assert again.wait_event("kv_tier.opened")["found"] == PROMPTS * (101 // BLOCK_TOKENS)
