"""The worked example for Kubernetes: it parses, its names agree, and its options and metrics exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.policies.policy_file import parse_policy
from coordinator.tenants.policy_file import load_tenants
from splitserve.config.autoscaler import KubernetesConfig
from splitserve.config.command_line import settings_of
from splitserve.errors import ConfigError
from splitserve.rpc.credentials import read_token
from tests.support.kubernetes.kubernetes_schema import check_document
from tests.support.scaling.service_settings import COMMANDS

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "compose" / "kubernetes"
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
OTHER_APIS = ("keda.sh/v1alpha1", "kustomize.config.k8s.io/v1beta1")
"""Of custom resources, which the API server learns from their operators, and of kubectl's own files."""


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_every_file_holds_named_documents(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert document["apiVersion"]
        assert document["kind"]
        assert document["metadata"]["name"].startswith("splitserve-")
        if document["apiVersion"] not in OTHER_APIS:
            check_document(document)


@pytest.mark.parametrize(("name", "deployment"), DEPLOYMENTS.items())
def test_commands_and_labels(name: str, deployment: dict[str, Any]) -> None:
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == {"app": name}
    command, *options = pod(deployment)["containers"][0]["args"]
    known = {setting.flag for setting in settings_of(COMMANDS[command])}
    for option in options:
        flag, _, value = option.partition("=")
        assert flag in known, option
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
    assert worker["terminationGracePeriodSeconds"] >= policy.drain_s + 30
    assert container["resources"]["limits"] == {"nvidia.com/gpu": policy.gpus_per_replica}
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
    known = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    used = re.findall(r"splitserve_\w+", (FOLDER / f"{file}.yaml").read_text())
    assert used
    assert all(f"`{series}`" in known for series in used)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_part_has_the_cluster_token_and_all_three_probes(name: str) -> None:
    part = pod(DEPLOYMENTS[name])
    container = part["containers"][0]
    assert "--cluster-token-file=/keys/cluster_token" in container["args"]
    assert {"name": "keys", "mountPath": "/keys", "readOnly": True} in container["volumeMounts"]
    keys = next(volume["secret"] for volume in part["volumes"] if volume["name"] == "keys")
    secret = found("secret", "Secret")[keys["secretName"]]
    assert {item["key"] for item in keys.get("items", ())} <= set(secret["stringData"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_secrets_that_stand_there_open_nothing(tmp_path: Path) -> None:
    given = found("secret", "Secret")["splitserve-keys"]["stringData"]
    assert set(given) == {"cluster_token", "tenants.yaml", "cache_salt"}
    for name, text in given.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="must hold 16 to 1024"):
        read_token(tmp_path / "cluster_token")
    with pytest.raises(ConfigError):
        load_tenants(tmp_path / "tenants.yaml", b"x" * 32)
    assert (
        "--tenants=/keys/tenants.yaml" in pod(DEPLOYMENTS["splitserve-coordinator"])["containers"][0]["args"]
    )


def test_every_part_has_a_network_policy_that_names_existing_pods_and_ports() -> None:
    policies = [policy["spec"] for policy in found("network-policy", "NetworkPolicy").values()]
    chosen = [name for policy in policies for name in apps(policy["podSelector"])]
    assert sorted(chosen) == sorted(DEPLOYMENTS)
    for policy in policies:
        listens = {
            port["containerPort"]
            for name in apps(policy["podSelector"])
            for port in pod(DEPLOYMENTS[name])["containers"][0]["ports"]
        }
        assert policy["policyTypes"] == ["Ingress"]
        for rule in policy["ingress"]:
            assert {port["port"] for port in rule.get("ports", ())} <= listens
            for peer in rule["from"]:
                assert set(apps(peer.get("podSelector", {}))) <= set(DEPLOYMENTS)


def apps(selector: dict[str, Any]) -> list[str]:
    """The values of the label `app` that a selector names."""
    named = [selector["matchLabels"]["app"]] if "app" in selector.get("matchLabels", {}) else []
    for expression in selector.get("matchExpressions", ()):
        assert (expression["key"], expression["operator"]) == ("app", "In")
        named += expression["values"]
    return named


def test_workers_of_both_pools_reach_each_other() -> None:
    """A worker may take the other role than that of the pool it was started for."""
    workers = found("network-policy", "NetworkPolicy")["splitserve-workers"]["spec"]
    assert set(apps(workers["podSelector"])) == set(POOLS)
    (peers,) = [rule for rule in workers["ingress"] if "ports" not in rule]
    assert set(apps(peers["from"][0]["podSelector"])) == set(POOLS)


def test_the_patches_for_vllm_change_what_the_workers_have() -> None:
    (overlay,) = yaml.safe_load_all((ROOT / "compose/kubernetes-vllm/kustomization.yaml").read_text())
    (operations,) = [yaml.safe_load(patch["patch"]) for patch in overlay["patches"]]
    changed = {operation["path"].removeprefix("/spec/template/spec/"): operation for operation in operations}
    for name in POOLS:
        (container,) = pod(DEPLOYMENTS[name])["containers"]
        assert container["image"].startswith(overlay["images"][0]["name"] + ":")
        assert container["args"][6].startswith("--model=")
        assert "failureThreshold" in container["startupProbe"]
        assert "memory" in container["resources"]["requests"]
        options = [operation["value"] for path, operation in changed.items() if "/args/" in path]
        parsed = settings_of(COMMANDS[container["args"][0]])
        assert {option.partition("=")[0] for option in options} <= {setting.flag for setting in parsed}
