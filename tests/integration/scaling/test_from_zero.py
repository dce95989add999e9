"""From and to zero with two coordinators and real processes of the simulated engine: no request is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from autoscaler.actuators.actuator import ONE_GPU, ActualReplica, Actuator, ReplicaShape
from autoscaler.control_loop import ControlLoop
from autoscaler.policy_in_force import PolicyFile
from autoscaler.service import control_loop
from splitserve.client import AsyncClient
from splitserve.roles import POOLS, PoolName
from tests.support.clients.patient import PatientClient, PatientScalingClient
from tests.support.cluster.ports import free_port
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import tokens
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
IDLE_S = 1.0
BURST = 24
MAX_TOKENS = 5
ABOUT_THE_END_S = (1.0, 1.2, 1.4)
"""When the next request comes after the last one: about the moment at which the last replicas are given up."""


class ClusterActuator(Actuator):
    """Adds workers to a running cluster, and ends them. Those that the cluster began with are not its own."""

    proves_end = True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: dict[str, tuple[PoolName, ServiceProcess, float]] = {}
        self._stopping: set[str] = set()
        self.started = dict.fromkeys(POOLS, 0)

    async def replicas(self) -> tuple[ActualReplica, ...]:
        alive = {name: each for name, each in self._made.items() if each[1].process.poll() is None}
        return tuple(
            ActualReplica(name, pool, name in self._stopping, since_s)
            for name, (pool, _, since_s) in sorted(alive.items())
        )

    async def start(self, pool: PoolName, count: int, shape: ReplicaShape = ONE_GPU) -> None:
        for _ in range(count):
            name = f"{pool}-made-{self.started[pool]}"
            self.started[pool] += 1
            self._made[name] = pool, self._cluster.add_worker(pool, name), time.time()

    async def stop(self, names: Sequence[str], drain_s: float) -> None:
        for name in names:
            if name in self._made and name not in self._stopping:
                self._stopping.add(name)
                self._made[name][1].signal(signal.SIGTERM)

    async def close(self) -> None:
        """The processes are the cluster's."""


class Zero:
    """A cluster that is scaled to zero, seen by its clients."""

    def __init__(self, loop: ControlLoop, actuator: ClusterActuator, clients: list[AsyncClient]) -> None:
        self.loop, self.actuator, self.clients = loop, actuator, clients
        self._seed = 0

    async def ask(self) -> None:
        """One request, at one coordinator after the other."""
        self._seed += 1
        client, prompt = self.clients[self._seed % len(self.clients)], tokens(30, self._seed)
        answer = await client.generate(prompt, max_tokens=MAX_TOKENS, timeout_s=2 * PATIENCE_S)
        assert list(answer.token_ids) == expected_tokens(prompt, MAX_TOKENS)

    async def to_zero(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.actuator.replicas():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def scaled(log_dir: Path, folder: Path, **rules: object) -> AsyncIterator[Zero]:
    pool = {
        "kind": "schedule",
        "min_replicas": 0,
        "max_replicas": 2,
        "gpus_per_replica": 0,
        "cold_start_s": 5,
        "start_deadline_cold_starts": PATIENCE_S / 5,
    }
    policy = folder / "policy.yaml"
    rules = {"interval_s": 0.3, "idle_s": IDLE_S, "prefill": pool, "decode": pool, **rules}
    policy.write_text(json.dumps(rules))
    port = free_port()
    other = ServiceProcess("other", ["coordinator", "--grpc-port", str(port), "--http-port", "off"], log_dir)
    other_target = f"127.0.0.1:{port}"
    cluster = Cluster(log_dir, prefill=0, decode=0, worker_options=["--coordinator", other_target])
    other.start()
    try:
        other.wait_event("coordinator.ready")
        async with (
            running(cluster),
            PatientClient(cluster.target) as ours,
            PatientClient(other_target) as theirs,
        ):
            actuator, targets = ClusterActuator(cluster), [cluster.target, other_target]
            async with control_loop(PolicyFile(policy), targets, actuator) as loop:
                running_loop = asyncio.create_task(loop.run())
                try:
                    yield Zero(loop, actuator, [ours, theirs])
                    await cluster.assert_no_leaks()
                finally:
                    running_loop.cancel()
    finally:
        other.terminate()


async def test_no_request_is_lost(log_dir: Path, tmp_path: Path) -> None:
    async with scaled(log_dir, tmp_path) as zero:
        # Nobody knows the model yet: it is started once, to be known.
        for client in zero.clients:
            await client.wait_ready()
        await zero.to_zero()
        for client in zero.clients:
            (model,) = await client.models()
            assert model.ready, "requests for it are taken"
        await asyncio.gather(*(zero.ask() for _ in range(BURST)))
        assert zero.actuator.started == {"prefill": 2, "decode": 2}, "one of each for all of them"
        for after_s in ABOUT_THE_END_S:
            await asyncio.sleep(after_s)
            await zero.ask()
        await zero.to_zero()
        reasons = [one["pools"]["prefill"]["reason"] for one in zero.loop.journal.decisions]
        assert any(reason.startswith("from zero: ") and "wait" in reason for reason in reasons)
        assert any(reason.startswith("to zero: idle for ") for reason in reasons)


async def test_who_leaves_while_workers_start_leaves_no_demand(log_dir: Path, tmp_path: Path) -> None:
    async with scaled(log_dir, tmp_path) as zero:
        for client in zero.clients:
            await client.wait_ready()
        await zero.to_zero()
        asking = [asyncio.create_task(zero.ask()) for _ in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            while not await zero.actuator.replicas():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await zero.to_zero()
        for client in zero.clients:
            async with PatientScalingClient(client.target) as scaling:
                (model,) = (await scaling.signals()).models
                assert model.in_progress.waiting_for_workers == 0
                assert model.in_progress.admitting_requests == 0
        await zero.ask()
