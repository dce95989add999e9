"""Each service by itself: health, reflection, drain on SIGTERM, cores and threads."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from splitserve.client import AsyncClient, Completion
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S

SERVICES = {
    "coordinator": ["splitserve.v1.InferenceService", "splitserve.v1.RegistryService"],
    "prefill-0": ["splitserve.v1.PrefillService"],
    "decode-0": ["splitserve.v1.DecodeService"],
}
SLOW = "engine:\n  simulated_step_s: 0.02\n"
PROMPT = [104, 101, 108, 108, 111]
MANY = 10
"""Tries to catch a worker while it loads."""

pytestmark = pytest.mark.timeout(90)


def address_of(cluster: Cluster, name: str) -> str:
    event = "coordinator.ready" if name == "coordinator" else "worker.ready"
    return f"127.0.0.1:{cluster.members[name].wait_event(event)['port']}"


@pytest.mark.parametrize("name", SERVICES)
async def test_health_and_reflection(simulated_cluster: Cluster, name: str) -> None:
    async with grpc.aio.insecure_channel(address_of(simulated_cluster, name)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", *SERVICES[name]):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=PATIENCE_S
        )
        names = {s.name async for answer in listing for s in answer.list_services_response.service}
    assert {*SERVICES[name], "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_sigterm_drains(log_dir: Path, victim: str) -> None:
    config = log_dir / "slow.yaml"
    config.write_text(SLOW)
    cluster = Cluster(log_dir, worker_options=["--config", str(config)])
    async with running(cluster), AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        stream = client.stream(PROMPT, max_tokens=60)
        first = await anext(stream)
        assert first.token_ids
        cluster.members[victim].signal(signal.SIGTERM)
        last = first
        async for item in stream:
            last = item
        assert isinstance(last, Completion)
        assert list(last.token_ids) == expected_tokens(PROMPT, 60)
        assert last.served_by.attempts == 1
        assert cluster.members[victim].process.wait(PATIENCE_S) == 0


async def test_a_worker_that_is_stopped_while_it_loads_ends_at_once(log_dir: Path, smollm2: str) -> None:
    cluster = Cluster(log_dir, model=smollm2, engine="torch", prefill=0, decode=0)
    async with running(cluster):
        for name in (f"decode-{number}" for number in range(MANY)):
            worker = cluster.add_worker("decode", name)
            worker.wait_event("worker.loading")
            # Whatever comes next, it comes after the signal.
            for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
                worker.signal(number)
            assert worker.process.wait(PATIENCE_S) == 0
            events = [event.get("event") for event in worker.events()]
            if "worker.ready" not in events:  # it had loaded before this process had a core to stop it
                break
        assert "process.stopped_at_start" in events
        assert "worker.ready" not in events


async def test_a_worker_runs_where_it_was_told(log_dir: Path) -> None:
    core = max(os.sched_getaffinity(0))
    cluster = Cluster(log_dir, worker_options=["--cpus", str(core)])
    async with running(cluster):
        for name in ("prefill-0", "decode-0"):
            assert psutil.Process(cluster.members[name].process.pid).cpu_affinity() == [core]
