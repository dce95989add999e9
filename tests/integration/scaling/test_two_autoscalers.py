"""Autoscalers beside a running cluster: of two one acts, an edited policy is taken, another model's workers stay."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.policy_in_force import PolicyFile
from autoscaler.service import control_loop
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster
from tests.support.kubernetes.kubernetes_api import FakeKubernetes, Workload, serving_kubernetes
from tests.support.scaling.fake_actuator import FakeActuator
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
LEASE_S = 8.0
"""So long none of the processes stands still by itself."""


def write_policy(path: Path, least: int) -> None:
    pool = {"kind": "schedule", "min_replicas": least, "max_replicas": 9, "gpus_per_replica": 0}
    policy = {"interval_s": 0.2, "prefill": pool, "decode": pool}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(policy))
    new.rename(path)  # nobody reads half of it


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def two_autoscalers(target: str, folder: Path, kubeconfig: Path) -> Iterator[list[ServiceProcess]]:
    options = ["--policy", str(folder / "policy.yaml"), "--coordinator", target, "--lease", f"{LEASE_S:g}"]
    options += ["--actuator", "kubernetes", "--kubeconfig", str(kubeconfig)]
    options += ["--prefill-workload", "deployment/prefill", "--decode-workload", "deployment/decode"]
    both = [ServiceProcess(f"autoscaler-{n}", ["autoscaler", *options], folder) for n in range(2)]
    for each in both:
        each.start()
    try:
        yield both
    finally:
        codes = [each.terminate() for each in both]
        assert codes == [0, 0]


def has(process: ServiceProcess, event: str) -> int:
    return sum(entry.get("event") == event for entry in process.events())


def acts(process: ServiceProcess) -> bool:
    """Whether it would act on its latest decision."""
    return [bool(entry["acts"]) for entry in process.events() if entry["event"] == "scaling.decided"][-1]


async def test_one_acts_and_the_other_takes_over_when_it_stops(
    simulated_cluster: Cluster, tmp_path: Path
) -> None:
    write_policy(tmp_path / "policy.yaml", 3)
    kubernetes = FakeKubernetes(Workload("deployment", "prefill"), Workload("deployment", "decode"))
    with serving_kubernetes(kubernetes, tmp_path) as kubeconfig:
        await asyncio.to_thread(_take_turns, simulated_cluster.target, tmp_path, kubeconfig, kubernetes)
    await simulated_cluster.assert_no_leaks()


def _take_turns(target: str, folder: Path, kubeconfig: Path, kubernetes: FakeKubernetes) -> None:
    def ordered() -> list[int]:
        return [workload.replicas for workload in kubernetes.workloads.values()]

    with two_autoscalers(target, folder, kubeconfig) as both:
        # The cluster's own worker of each pool is not theirs, and counts.
        until(lambda: ordered() == [2, 2])
        until(lambda: all(has(each, "lease.acquired") + has(each, "lease.observing") for each in both))
        until(lambda: any(has(each, "scaling.acted") == 2 for each in both))
        leader = next(each for each in both if has(each, "scaling.acted"))
        other = next(each for each in both if each is not leader)
        assert not has(other, "scaling.acted")
        leader.signal(signal.SIGSTOP)
        until(lambda: has(other, "lease.acquired"))
        write_policy(folder / "policy.yaml", 4)
        until(lambda: ordered() == [3, 3])
        assert has(other, "policy.reloaded") == 1
        acted = has(leader, "scaling.acted")
        leader.signal(signal.SIGCONT)
        until(lambda: not acts(leader) and has(leader, "policy.reloaded"))
        write_policy(folder / "policy.yaml", 5)
        until(lambda: ordered() == [4, 4])
        assert has(leader, "scaling.acted") == acted
        # Told to end, it gives the lease up.
        began = has(leader, "lease.acquired")
        other.terminate()
        until(lambda: has(leader, "lease.acquired") == began + 1)


async def test_workers_of_another_model_are_not_drained(simulated_cluster: Cluster, tmp_path: Path) -> None:
    write_policy(tmp_path / "policy.yaml", 1)
    for pool in ("prefill", "decode"):
        simulated_cluster.add_worker(pool, f"{pool}-other", "--served-model-name", "other")
    await simulated_cluster.wait_ready(2, 2)
    actuator = FakeActuator()
    for name in ("prefill-0", "decode-0", "prefill-other", "decode-other"):
        pool = "prefill" if name.startswith("prefill") else "decode"
        actuator.there[name] = ActualReplica(name, pool, False, 1.0)  # type: ignore[arg-type]
    file = PolicyFile(tmp_path / "policy.yaml")
    async with control_loop(file, [simulated_cluster.target], actuator, model="simulated") as loop:
        async with asyncio.timeout(PATIENCE_S):
            while loop.status.decisions < 5:  # a coordinator that is busy may not answer in time
                await loop.tick()
    assert actuator.calls == []
    for pool in ("prefill", "decode"):
        simulated_cluster.members.pop(f"{pool}-other").terminate()
