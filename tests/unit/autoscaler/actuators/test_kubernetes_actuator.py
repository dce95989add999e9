"""The Kubernetes actuator: orders before and after the controllers act, and errors of the API server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from autoscaler.actuators import kubernetes_api
from autoscaler.actuators.actuator import ReplicaShape
from autoscaler.actuators.kubernetes import KubernetesActuator
from splitserve.config.autoscaler import KubernetesConfig
from splitserve.errors import (
    ConfigError,
    FailedPreconditionError,
    NotFoundError,
    SplitserveError,
    UnavailableError,
)
from tests.support.kubernetes.kubernetes_api import (
    COST,
    NAMESPACE,
    FakeKubernetes,
    Workload,
    serving_kubernetes,
)


@pytest.fixture
def kubernetes() -> FakeKubernetes:
    """A fake API server whose controllers act on demand."""
    return FakeKubernetes(
        Workload("deployment", "prefill"), Workload("deployment", "decode", 3), prompt=False
    )


@pytest.fixture
def kubeconfig(kubernetes: FakeKubernetes, tmp_path: Path) -> Iterator[Path]:
    with serving_kubernetes(kubernetes, tmp_path) as path:
        yield path


@pytest.fixture
async def actuator(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubernetesActuator]:
    monkeypatch.setattr(kubernetes_api, "CALL_S", 60.0)
    settings = KubernetesConfig(
        kubeconfig=kubeconfig, prefill="deployment/prefill", decode="deployment/decode"
    )
    opened = KubernetesActuator.connect(settings)
    yield opened
    await opened.close()


async def listed(actuator: KubernetesActuator) -> dict[str, bool]:
    """`stopping` by name."""
    return {replica.name: replica.stopping for replica in await actuator.replicas()}


async def test_ordered_pods_count_before_they_exist(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes
) -> None:
    assert list(await listed(actuator)) == [f"decode-pending-{n}" for n in range(3)]
    await actuator.start("decode", 1)
    assert len(await listed(actuator)) == 4
    kubernetes.control()
    assert list(await listed(actuator)) == sorted(kubernetes.pods)


async def test_an_order_is_taken_back_before_its_pod_exists(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes
) -> None:
    await actuator.stop(["decode-pending-2"], 30.0)
    assert kubernetes.workloads["deployment", "decode"].replicas == 2
    assert not [request for request in kubernetes.requests if "/pods/" in request[1]]


async def test_the_chosen_pod_goes_and_nothing_is_ordered_twice(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes
) -> None:
    kubernetes.control()
    first, chosen, last = kubernetes.pods
    for _ in range(2):
        await actuator.stop([chosen], 30.0)
        assert await listed(actuator) == {first: False, chosen: True, last: False}
    assert kubernetes.workloads["deployment", "decode"].replicas == 2
    changes = [path.rpartition("/")[2] for method, path in kubernetes.requests if method == "PATCH"]
    assert changes == [chosen, "scale"]
    kubernetes.control()
    assert kubernetes.pods[chosen].deleting
    kubernetes.control()
    assert list(kubernetes.pods) == [first, last]


async def test_an_attempt_that_went_no_further_is_undone(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes
) -> None:
    kubernetes.control()
    first, second, _ = kubernetes.pods
    kubernetes.pods[first].annotations[COST] = "-1000"
    assert not any((await listed(actuator)).values())
    await actuator.stop([second], 30.0)
    assert COST not in kubernetes.pods[first].annotations
    kubernetes.control()
    assert [name for name, pod in kubernetes.pods.items() if pod.deleting] == [second]


async def test_a_pod_too_many_of_a_rolling_update_is_not_scaled_in(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes
) -> None:
    kubernetes.control()
    kubernetes._make(kubernetes.workloads["deployment", "decode"])
    surge = list(kubernetes.pods)[-1]
    kubernetes.pods[surge].ready = False
    assert [name for name, stopping in (await listed(actuator)).items() if stopping] == [surge]
    await actuator.stop([surge], 30.0)
    assert kubernetes.workloads["deployment", "decode"].replicas == 3


async def test_a_change_by_somebody_else_is_not_overwritten(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes
) -> None:
    kubernetes.control()
    scale = await actuator._api.scale("deployment/decode")
    await actuator.start("decode", 1)
    with pytest.raises(UnavailableError, match="the object has been modified") as caught:
        await actuator._api.set_replicas("deployment/decode", 1, scale.version)
    assert caught.value.reason == "CHANGED_MEANWHILE"
    assert kubernetes.workloads["deployment", "decode"].replicas == 4


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (403, FailedPreconditionError, "FORBIDDEN"),
        (404, NotFoundError, "NOT_FOUND"),
        (500, UnavailableError, "KUBERNETES_FAILED"),
    ],
)
async def test_what_the_server_says(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes, status: int, kind: type, reason: str
) -> None:
    kubernetes.refuse = status
    with pytest.raises(kind, match=rf"kubernetes: deployment/prefill: {status} the server says no") as caught:
        await actuator.replicas()
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "odd", [{}, [], "a page", {"spec": [], "status": 1}, {"items": [{}], "spec": {"replicas": 1}}]
)
async def test_what_is_no_answer_of_an_api_server(
    actuator: KubernetesActuator, kubernetes: FakeKubernetes, odd: object
) -> None:
    """The loop takes a SplitserveError as a failed look, and goes on."""
    kubernetes.odd = odd
    with pytest.raises(UnavailableError, match="not an answer of an API server") as caught:
        await actuator.replicas()
    assert caught.value.reason == "KUBERNETES_FAILED"


async def test_no_server(tmp_path: Path) -> None:
    with serving_kubernetes(FakeKubernetes(), tmp_path) as kubeconfig:
        actuator = KubernetesActuator.connect(KubernetesConfig(kubeconfig=kubeconfig))
    with pytest.raises(UnavailableError) as caught:
        await actuator.replicas()
    assert caught.value.reason == "KUBERNETES_UNREACHABLE"
    await actuator.close()


async def test_the_namespace_is_the_contexts_unless_given(kubeconfig: Path) -> None:
    for given, expected in ((None, NAMESPACE), ("other", "other")):
        actuator = KubernetesActuator.connect(KubernetesConfig(kubeconfig=kubeconfig, namespace=given))
        assert actuator._api.namespace == expected
        await actuator.close()


@pytest.mark.parametrize(
    "text",
    [
        b"a: [",
        b"\xff\xfe\x00",
        b"",
        b"[]",
        b"contexts: 1",
        b"apiVersion: v1\ncurrent-context: x\ncontexts: []",
    ],
)
def test_what_is_no_kubeconfig_is_named(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "config"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"kubernetes\.kubeconfig: .") as caught:
        KubernetesActuator.connect(KubernetesConfig(kubeconfig=file))
    assert caught.value.field == "kubernetes.kubeconfig"


def test_a_missing_kubeconfig_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kubernetes\.kubeconfig"):
        KubernetesActuator.connect(KubernetesConfig(kubeconfig=tmp_path / "none"))


@pytest.mark.parametrize(
    ("limits", "arguments", "gpus_each", "words"),
    [
        ({}, [], 1, None),  # a pool on cpu, with the policy's default
        ({"nvidia.com/gpu": "1"}, [], 1, None),
        ({"nvidia.com/mig-3g.40gb": "1", "memory": "8Gi"}, [], 1, None),
        ({"nvidia.com/gpu": "2"}, ["--engine=vllm"], 2, None),
        (
            {"nvidia.com/gpu": "2"},
            ["--engine=vllm"],
            1,
            "gpus_per_replica is 1, but the pods of .* to 2 GPUs",
        ),
        ({}, ["--engine=vllm"], 4, "gpus_per_replica is 4, but the pods of .* limited to 0 GPUs"),
        ({"nvidia.com/gpu": "2"}, [], 2, "the torch engine computes on one GPU"),
        ({"nvidia.com/gpu": "2"}, ["--engine=vllm", "--engine-args=-tp 4"], 2, "ask for 4 ranks"),
    ],
)
async def test_pods_and_policy_agree_on_gpus(
    actuator: KubernetesActuator,
    kubernetes: FakeKubernetes,
    limits: dict[str, str],
    arguments: list[str],
    gpus_each: int,
    words: str | None,
) -> None:
    workload = kubernetes.workloads["deployment", "decode"]
    workload.limits, workload.arguments = limits, arguments
    kubernetes.control()
    if words is None:
        await actuator.start("decode", 1, ReplicaShape(gpus_each))
    else:
        with pytest.raises(SplitserveError, match=words) as caught:
            await actuator.start("decode", 1, ReplicaShape(gpus_each))
        assert caught.value.field == "gpus_per_replica"
    assert workload.replicas == (4 if words is None else 3)
