"""Neutral workers as pods: what a workload runs and what the policy starts agree; the loop moves them, stops them in
the workload that has them, and starts nothing in place of those that nobody sees."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from autoscaler.actuators.actuator import ReplicaKind
from autoscaler.actuators.kubernetes import KubernetesActuator
from splitserve.config.autoscaler import KubernetesConfig
from splitserve.errors import FailedPreconditionError
from tests.support.kubernetes.kubernetes_api import FakeKubernetes, Workload, serving_kubernetes
from tests.support.scaling.neutral_loop import NeutralLoop

NEUTRAL, PINNED = ReplicaKind(gpus=0, neutral=True), ReplicaKind(gpus=0)
WORKER = ["worker", "--leaning=decode", "--worker-id=$(POD_NAME)"]


@pytest.fixture(params=["deployment", "statefulset"])
def kubernetes(request: pytest.FixtureRequest) -> FakeKubernetes:
    return FakeKubernetes(
        Workload(request.param, "prefill", arguments=["worker", "--leaning=prefill"]),
        Workload(request.param, "decode", arguments=WORKER),
        Workload(request.param, "decode-big", arguments=WORKER),
    )


@pytest.fixture
def kubeconfig(kubernetes: FakeKubernetes, tmp_path: Path) -> Iterator[Path]:
    with serving_kubernetes(kubernetes, tmp_path) as path:
        yield path


def connect(kubernetes: FakeKubernetes, kubeconfig: Path, *classes: str) -> KubernetesActuator:
    kind = next(iter(kubernetes.workloads))[0]
    pools = {"prefill": f"{kind}/prefill", "decode": f"{kind}/decode"}
    return KubernetesActuator.connect(
        KubernetesConfig(kubeconfig=kubeconfig, classes=classes, request_timeout_s=60, **pools)
    )


@pytest.fixture
async def actuator(kubernetes: FakeKubernetes, kubeconfig: Path) -> AsyncIterator[KubernetesActuator]:
    opened = connect(kubernetes, kubeconfig)
    yield opened
    await opened.close()


def counts(kubernetes: FakeKubernetes) -> dict[str, int]:
    return {name: workload.replicas for (_, name), workload in kubernetes.workloads.items()}


async def test_pods_of_the_other_kind_are_not_multiplied(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes
) -> None:
    await actuator.start("decode", 1, NEUTRAL)
    with pytest.raises(
        FailedPreconditionError, match=r"the pods of \w+/decode run neutral workers"
    ) as refused:
        await actuator.start("decode", 1, PINNED)
    assert (refused.value.reason, refused.value.field) == ("WORKER_KIND", "workers")
    workload = next(one for (_, name), one in kubernetes.workloads.items() if name == "prefill")
    workload.arguments = ["prefill-worker"]
    await actuator.start("prefill", 1, PINNED)
    with pytest.raises(FailedPreconditionError, match=r"the pods of \w+/prefill run pinned workers"):
        await actuator.start("prefill", 1, NEUTRAL)
    assert counts(kubernetes) == {"prefill": 1, "decode": 1, "decode-big": 0}


async def test_while_pinned_pods_are_rolled_the_newest_says_what_is_started(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes
) -> None:
    workload = next(one for (_, name), one in kubernetes.workloads.items() if name == "decode")
    workload.arguments = ["decode-worker"]
    await actuator.start("decode", 2, PINNED)
    kubernetes.prompt = False
    workload.arguments = WORKER
    with pytest.raises(FailedPreconditionError, match="run pinned workers"):
        await actuator.start("decode", 1, NEUTRAL)
    kubernetes._make(workload)
    await actuator.start("decode", 1, NEUTRAL)
    with pytest.raises(FailedPreconditionError, match="run neutral workers"):
        await actuator.start("decode", 1, PINNED)
    assert workload.replicas == 3


async def test_a_class_has_a_workload_of_neutral_pods_as_well(
    kubernetes: FakeKubernetes, kubeconfig: Path
) -> None:
    actuator = connect(kubernetes, kubeconfig, "big")
    try:
        big = ReplicaKind(gpus=0, neutral=True, replica_class="big")
        await actuator.start("decode", 2, big)
        assert [one.replica_class for one in await actuator.replicas()] == ["big", "big"]
        with pytest.raises(FailedPreconditionError, match=r"the pods of \w+/decode-big run neutral workers"):
            await actuator.start("decode", 1, ReplicaKind(gpus=0, replica_class="big"))
    finally:
        await actuator.close()


async def test_they_change_sides_and_are_stopped_in_the_workload_that_has_them(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes
) -> None:
    loop = NeutralLoop(actuator)
    await loop.tick(1, 3)
    assert counts(kubernetes) == {"prefill": 1, "decode": 3, "decode-big": 0}
    await loop.all_seen()
    await loop.tick(3, 1)
    assert loop.sides == (3, 1)
    await loop.tick(3, 1)
    assert counts(kubernetes) == {"prefill": 1, "decode": 3, "decode-big": 0}, "nothing is started or stopped"
    # Some of decode's pods lean to prefill: they are ended there, one at a time.
    for _ in range(5):
        await loop.tick(1, 1)
        await loop.all_seen()
    assert sum(counts(kubernetes).values()) == 2
    await loop.tick(1, 1)
    assert loop.sides == (1, 1)
    assert len(kubernetes.pods) == 2


async def test_coordinators_that_have_just_restarted_start_nothing(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes
) -> None:
    loop = NeutralLoop(actuator)
    await loop.tick(1, 3)
    await loop.all_seen()
    await loop.tick(3, 1)
    leaning, loop.leans = loop.leans, {}
    for _ in range(3):
        await loop.tick(3, 1)
    assert counts(kubernetes) == {"prefill": 1, "decode": 3, "decode-big": 0}
    loop.leans = dict(list(leaning.items())[:2])
    await loop.tick(3, 1)
    loop.leans = leaning
    await loop.tick(3, 1)
    assert counts(kubernetes) == {"prefill": 1, "decode": 3, "decode-big": 0}
    assert loop.sides == (3, 1)
