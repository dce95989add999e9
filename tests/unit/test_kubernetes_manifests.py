"""The worked example for Kubernetes: it parses, its names agree, and its options and metrics exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.policy_file import parse_policy
from splitserve.config import KubernetesConfig
from splitserve.service_arguments import AUTOSCALER_OPTIONS, COORDINATOR_OPTIONS, WORKER_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "compose" / "kubernetes"
OPTIONS = {
    "coordinator": COORDINATOR_OPTIONS,
    "prefill-worker": WORKER_OPTIONS,
    "decode-worker": WORKER_OPTIONS,
    "autoscaler": AUTOSCALER_OPTIONS,
}
POOLS = ("splitserve-prefill", "splitserve-decode")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def found(name: str, kind: str) -> dict[str, dict[str, Any]]:
    """The documents of one kind in a file, by their names."""
    return {d["metadata"]["name"]: d for d in documents(name) if d["kind"] == kind}


def pod(deployment: dict[str, Any]) -> dict[str, Any]:
    return deployment["spec"]["template"]["spec"]


DEPLOYMENTS = {
    name: deployment
    for file in ("coordinator", "workers", "autoscaler")
    for name, deployment in found(file, "Deployment").items()
}
POLICY = parse_policy(
    yaml.safe_load(found("autoscaler", "ConfigMap")["splitserve-policy"]["data"]["policy.yaml"])
)


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_every_file_holds_named_documents(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert document["apiVersion"]
        assert document["kind"]
        assert document["metadata"]["name"].startswith("splitserve-")


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_commands_and_labels(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == {"app": name}
    command, *options = pod(deployment)["containers"][0]["args"]
    for option in options:
        flag, _, value = option.partition("=")
        assert flag.removeprefix("--").replace("-", "_") in OPTIONS[command], option
        assert value


def test_pools_are_those_that_the_autoscaler_scales_and_may_scale() -> None:
    settings = KubernetesConfig()
    assert (settings.prefill, settings.decode) == tuple(f"deployment/{name}" for name in POOLS)
    assert set(POOLS) < set(DEPLOYMENTS)
    rules = found("autoscaler", "Role")["splitserve-autoscaler"]["rules"]
    assert rules == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": list(POOLS),
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]},
    ]
    binding = found("autoscaler", "RoleBinding")["splitserve-autoscaler"]
    account = pod(DEPLOYMENTS["splitserve-autoscaler"])["serviceAccountName"]
    assert binding["roleRef"]["name"] in found("autoscaler", "Role")
    assert binding["subjects"][0]["name"] == account
    assert account in found("autoscaler", "ServiceAccount")


@pytest.mark.parametrize(("name", "policy"), list(zip(POOLS, (POLICY.prefill, POLICY.decode), strict=True)))
def test_workers_drain_within_their_grace_and_are_named_by_their_pods(name: str, policy: Any) -> None:
    worker = pod(DEPLOYMENTS[name])
    container = worker["containers"][0]
    assert f"--drain={policy.drain_s:g}" in container["args"]
    assert worker["terminationGracePeriodSeconds"] >= policy.drain_s + 5
    assert "replicas" not in DEPLOYMENTS[name]["spec"]
    assert "--worker-id=$(POD_NAME)" in container["args"]
    paths = {entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in container["env"]}
    assert paths == {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    (service,) = found("coordinator", "Service")
    assert f"--coordinator={service}:50051" in container["args"]


@pytest.mark.parametrize(("file", "kind"), [("keda", "ScaledObject"), ("hpa", "HorizontalPodAutoscaler")])
def test_other_scalers_name_our_pools_and_our_metrics(file: str, kind: str) -> None:
    scalers = found(file, kind)
    assert [scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers.values()] == list(POOLS)
    known = (ROOT / "docs" / "metrics.md").read_text()
    used = re.findall(r"splitserve_\w+", (FOLDER / f"{file}.yaml").read_text())
    assert used
    assert all(f"`{series}`" in known for series in used)
