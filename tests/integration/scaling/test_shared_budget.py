"""Two models on one budget, with real processes: load moves from one to the other, and replicas follow it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.actuators.actuator import ORDINARY, ActualReplica, Actuator, ReplicaKind
from autoscaler.sharing.models_file import load_models
from autoscaler.sharing.shared_service import ModelLoops, model_loops
from autoscaler.snapshot import PoolName
from splitserve.client import AsyncClient
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.kubernetes.kubernetes_api import FakeKubernetes, Workload, serving_kubernetes
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ONLY = [{"name": "only", "price_per_hour": 1.0}]
AT_ONCE = {"scaleDown": {"stabilizationWindowSeconds": 0}}
FUNCTION = '''
import math

from autoscaler.policies.recommendation import Recommendation


def two_each(memory, snapshot, status):
    """A replica for each two requests in progress."""
    need = snapshot.in_progress / 2
    return Recommendation(math.ceil(need), f"{snapshot.in_progress} in progress", need), memory
'''
START_S = 240.0
"""A busy machine loads weights for minutes."""


def write_models(folder: Path, budget: float, **more: Any) -> Path:
    (folder / "two_each.py").write_text(FUNCTION)
    pool = {"classes": ONLY, "gpus_per_replica": 0, "drain_s": 20, "cold_start_s": 1, "min_replicas": 1}
    pool |= {"start_deadline_cold_starts": 900}
    prefill = pool | {"kind": "schedule", "max_replicas": 1}
    decode = pool | {"kind": "custom", "function": "two_each.py:two_each", "behavior": AT_ONCE}
    policy = {"interval_s": 0.2, "lend_decode": False, "prefill": prefill, "decode": decode}
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    models = [{"name": name, "policy": "policy.yaml"} for name in ("one", "other")]
    path = folder / "models.yaml"
    path.write_text(
        yaml.safe_dump({"budget_per_hour": budget, "models": models, "move_after_s": 0.5, **more})
    )
    return path


class WorkerProcesses(Actuator):
    """Workers of one model. `started` is called after each start, before anything else happens."""

    proves_end = True

    def __init__(
        self, cluster: Cluster, model: str, options: Sequence[str], started: Callable[[], None]
    ) -> None:
        self._cluster, self._model, self._options, self._started = cluster, model, options, started
        self._ours: dict[str, tuple[PoolName, ServiceProcess, float]] = {}
        self._told: set[str] = set()
        self._number = 0

    @property
    def alive(self) -> list[str]:
        """Names of those whose processes have not ended."""
        return [name for name, (_, process, _) in self._ours.items() if process.process.poll() is None]

    def count(self, pool: PoolName) -> int:
        """Those of a pool that are not told to end."""
        return sum(self._ours[name][0] == pool and name not in self._told for name in self.alive)

    async def replicas(self) -> tuple[ActualReplica, ...]:
        """See Actuator."""
        found = []
        for name in sorted(self.alive):
            pool, _, made_s = self._ours[name]
            found.append(ActualReplica(name, pool, name in self._told, made_s))
        return tuple(found)

    async def start(self, pool: PoolName, count: int, kind: ReplicaKind = ORDINARY) -> None:
        """See Actuator."""
        for _ in range(count):
            name = f"{self._model}-{pool}-{self._number}"
            self._number += 1
            options = (*self._options, "--served-model-name", self._model)
            made = await asyncio.to_thread(self._cluster.add_worker, pool, name, *options)
            self._ours[name] = pool, made, time.time()
            self._started()

    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        """See Actuator."""
        for name in set(names) & set(self.alive) - self._told:
            self._told.add(name)
            self._ours[name][1].signal(signal.SIGTERM)

    async def close(self) -> None:
        """The processes stay with the cluster, which ends them."""


class Asking:
    """So many requests of a model at a time, one after the other, until `end`."""

    def __init__(self, client: AsyncClient, model: str) -> None:
        self._client, self._model = client, model
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self.answers: list[tuple[int, ...]] = []

    def begin(self, at_once: int) -> None:
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(at_once)]

    async def _ask(self) -> None:
        while not self._stop.is_set():
            made = await self._client.generate(
                [7] * 16,
                model=self._model,
                max_tokens=8,
                temperature=0.0,
                ignore_eos=True,
                timeout_s=PATIENCE_S,
            )
            self.answers.append(tuple(made.token_ids))

    async def end(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


async def follow_the_load(
    cluster: Cluster, folder: Path, budget: int, other_options: list[str]
) -> list[tuple[int, ...]]:
    """The budget holds the least of both models and `budget - 4` replicas more. The second model's answers."""
    most: list[int] = []

    def started() -> None:
        """All processes that exist, whoever started them and whether or not they are told to end."""
        most.append(sum(len(one.alive) for one in actuators.values()))

    actuators = {
        "one": WorkerProcesses(cluster, "one", ["--engine", "simulated", "--model", "simulated"], started),
        "other": WorkerProcesses(cluster, "other", other_options, started),
    }
    shared = load_models(write_models(folder, budget))
    more = budget - 4
    async with (
        cluster.client() as client,
        model_loops(shared, [cluster.target], actuators) as scaled,
    ):
        tasks = [asyncio.create_task(run()) for _, run in scaled.background]
        try:
            await asyncio.gather(*(client.wait_ready(START_S, model=name) for name in actuators))
            first, second = Asking(client, "one"), Asking(client, "other")
            first.begin(2 * more + 4)
            await until(lambda: actuators["one"].count("decode") == 1 + more, "the first model has the rest")
            second.begin(1)
            await until(lambda: len(second.answers) > 2 and bool(first.answers), "both are served")
            await until(lambda: "one" in told(scaled, "one"), "the reason")
            await first.end()
            more_of_it = Asking(client, "other")
            more_of_it.begin(2 * more + 4)
            await until(
                lambda: actuators["other"].count("decode") == 1 + more, "the second model has the rest"
            )
            await until(lambda: len(scaled.loops["other"].journal.decisions) > 0, "decided")
            late = Asking(client, "one")
            late.begin(1)
            await until(lambda: len(late.answers) > 2, "the first is served yet")
            for asking in (second, more_of_it, late):
                await asking.end()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert actuators["one"].count("decode") == 1
    assert max(most) == budget, "all of it was used, and never more"
    return [*second.answers, *more_of_it.answers]


def told(scaled: ModelLoops, model: str) -> str:
    """The latest reason that is about the budget."""
    reasons = [
        pool.reason
        for decision in scaled.loops[model].journal.decisions
        for pool in decision.pools.values()
        if pool.cause == "money_budget" and "for all models" in pool.reason
    ]
    return reasons[-1] if reasons else ""


async def test_replicas_follow_the_load_within_one_budget(tmp_path: Path) -> None:
    async with running(Cluster(tmp_path, prefill=0, decode=0)) as cluster:
        await follow_the_load(cluster, tmp_path, 6, ["--engine", "simulated", "--model", "simulated"])
        await cluster.assert_no_leaks()


async def test_real_weights_share_a_budget_with_another_model(tmp_path: Path, smollm2: str) -> None:
    options = ["--engine", "torch", "--model", smollm2, "--dtype", "float32", "--num-blocks", "128"]
    async with running(Cluster(tmp_path, prefill=0, decode=0)) as cluster:
        answers = await follow_the_load(cluster, tmp_path, 5, options)
        assert len(set(answers)) == 1, "the same tokens from all replicas"
        await cluster.assert_no_leaks()


def schedule(wanted: int) -> dict[str, Any]:
    always = [{"start": "00:00", "end": "00:00", "replicas": wanted}]
    return {"kind": "schedule", "classes": ONLY, "max_replicas": 5, "schedule": always}


async def test_the_service_keeps_the_budget_and_tells_why(simulated_cluster: Cluster, tmp_path: Path) -> None:
    """Two models on Kubernetes want six replicas each; there is money for nine. Also after it was killed."""
    workloads = [
        Workload("deployment", f"{model}-{pool}") for model in "ab" for pool in ("prefill", "decode")
    ]
    kubernetes = FakeKubernetes(*workloads)
    for model in "ab":
        policy = {"interval_s": 0.2, "lend_decode": False, "prefill": schedule(3), "decode": schedule(3)}
        (tmp_path / f"{model}.yaml").write_text(yaml.safe_dump(policy))
    models: list[dict[str, Any]] = [
        {
            "name": model,
            "policy": f"{model}.yaml",
            "prefill_workload": f"deployment/{model}-prefill",
            "decode_workload": f"deployment/{model}-decode",
        }
        for model in "ab"
    ]
    more = {"prefill": schedule(5), "decode": schedule(5)}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump(more))
    models[0]["shadow"] = ["more.yaml"]
    path = tmp_path / "models.yaml"
    path.write_text(yaml.safe_dump({"budget_per_hour": 9, "models": models}))
    with serving_kubernetes(kubernetes, tmp_path) as kubeconfig:
        await asyncio.to_thread(
            _within_nine, simulated_cluster.target, tmp_path, kubeconfig, kubernetes, path
        )
    await simulated_cluster.assert_no_leaks()


def _within_nine(target: str, folder: Path, kubeconfig: Path, kubernetes: FakeKubernetes, path: Path) -> None:
    options = ["--models", str(path), "--coordinator", target, "--lease", "1", "--metrics-port", "0"]
    options += ["--actuator", "kubernetes", "--kubeconfig", str(kubeconfig)]
    autoscaler = ServiceProcess("autoscaler", ["autoscaler", *options], folder)

    most = 9

    def ordered() -> int:
        total = sum(workload.replicas for workload in kubernetes.workloads.values())
        assert total <= most
        return total

    def wait(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, autoscaler.log_tail()
            time.sleep(0.05)

    autoscaler.start()
    wait(lambda: ordered() == 9)
    autoscaler.kill()
    autoscaler.start()
    port = autoscaler.wait_event("metrics.ready")["port"]

    def metrics() -> str:
        assert ordered() == most
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
            return str(page.read().decode())

    def acts() -> bool:
        text = metrics()
        series = ('desired_replicas{{model="{}",pool="decode"}}', 'holds_lease{{model="{}"}} 1.0')
        return all(f"splitserve_autoscaler_{one.format(model)}" in text for one in series for model in "ab")

    wait(acts)
    wanted = 'splitserve_autoscaler_shadow_desired_replicas{{model="{}",policy="more",pool="prefill"}}'
    wait(lambda: wanted.format("a") in metrics())
    assert wanted.format("b") not in metrics()
    command = [sys.executable, "-m", "splitserve", "autoscaler", "explain", "--target", f"127.0.0.1:{port}"]
    command += ["--last", "40"]

    def explains(*words: str) -> None:
        """The last decisions do, sooner or later: what is carried out is entered after it."""

        def said() -> bool:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
            return all(word in done.stdout for word in words)

        wait(said)

    explains(
        *("bound by money_budget", "within a budget of 9 an hour (a has "),
        *("all models together: 9 of 9 money (a has ", " for a  ", " for b  "),
    )
    text = metrics()
    assert 'splitserve_autoscaler_desired_replicas{model="a",pool="prefill"}' in text
    assert 'splitserve_autoscaler_shared_limit{resource="money"} 9.0' in text
    # The file is followed: there is more money, but only ten GPUs.
    new = path.with_suffix(".new")
    new.write_text(path.read_text().replace("budget_per_hour: 9", "budget_per_hour: 12\ngpu_budget: 10"))
    new.replace(path)  # nobody reads half of it
    most = 10
    autoscaler.wait_event("file.reloaded")
    wait(lambda: ordered() == 10)
    wait(lambda: 'splitserve_autoscaler_shared_limit{resource="gpus"} 10.0' in metrics())
    explains("bound by gpu_budget", "and a budget of 10 GPUs (a has ")
    assert autoscaler.terminate() == 0


def test_wrong_settings_end_it_with_one_line(tmp_path: Path) -> None:
    options = ["--models", str(write_models(tmp_path, 6)), "--model", "a"]
    command = [sys.executable, "-m", "splitserve", "autoscaler", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: model must not be given with models (--models)")
