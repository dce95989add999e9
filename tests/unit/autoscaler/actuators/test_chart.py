"""The chart in compose/helm, rendered by Helm: the API takes it, its names agree, its options and metrics exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.policies.policy_file import parse_policy
from launcher.cli.main import main
from splitserve import __version__
from splitserve.config.autoscaler import KubernetesConfig
from splitserve.config.command_line import settings_of
from tests.support.kubernetes.chart import CHART, of_kind, refusal, rendered, run_helm
from tests.support.kubernetes.kubernetes_schema import check_document
from tests.support.scaling.service_settings import COMMANDS

ROOT = CHART.parents[1]
POOLS = ("splitserve-prefill", "splitserve-decode")
VLLM = ("--values", str(CHART / "values-vllm.yaml"))
ALL_PARTS = ("--set", "prometheus.podMonitor=true", "--set", "models.size=100Gi")
ON_CPU = ("--set", "policy.prefill.gpus_per_replica=0,policy.decode.gpus_per_replica=0")
TWO_GPUS = ("--set", "policy.prefill.gpus_per_replica=2,policy.decode.gpus_per_replica=2")
SCALED_BY = {other: ("--set", f"scaling={other}") for other in ("hpa", "keda", "none")}
VARIANTS = [(), VLLM, ALL_PARTS, ON_CPU, VLLM + TWO_GPUS, *SCALED_BY.values()]
OPERATORS = ("keda.sh/v1alpha1", "monitoring.coreos.com/v1")
"""APIs of custom resources, which the API server learns from their operators."""

pytestmark = pytest.mark.timeout(120)


def pod(deployment: dict[str, Any]) -> dict[str, Any]:
    return deployment["spec"]["template"]["spec"]


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(deployment)["containers"]
    return only


DEPLOYMENTS = ("splitserve-autoscaler", "splitserve-coordinator", "splitserve-decode", "splitserve-prefill")


def test_lint() -> None:
    for options in ((), VLLM):
        run = run_helm("lint", "--strict", str(CHART), *options)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("options", VARIANTS, ids=" ".join)
def test_the_api_takes_every_document(options: tuple[str, ...]) -> None:
    for document in rendered(*options):
        assert document["metadata"]["name"].startswith("splitserve")
        if document["apiVersion"] not in OPERATORS:
            check_document(document)


@pytest.mark.parametrize("options", VARIANTS, ids=" ".join)
def test_commands_labels_and_safety(options: tuple[str, ...]) -> None:
    documents = rendered(*options)
    deployments = of_kind(documents, "Deployment")
    assert sorted(deployments) == [
        name for name in DEPLOYMENTS if name != DEPLOYMENTS[0] or scales(documents)
    ]
    for deployment in deployments.values():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
        part = container(deployment)
        command, *given = part["args"]
        known = {setting.flag for setting in settings_of(COMMANDS[command])}
        for option in given:
            flag, _, value = option.partition("=")
            assert flag in known, option
            assert value
        assert "--cluster-token-file=/keys/cluster_token" in given
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(part)
        assert pod(deployment)["securityContext"]["runAsNonRoot"] is True
        assert part["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def scales(documents: tuple[dict[str, Any], ...]) -> bool:
    return "splitserve-autoscaler" in of_kind(documents, "Role")


def test_the_secret_holds_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`splitserve keys init`, whose folder becomes the Secret."""
    assert main(["keys", "init", str(tmp_path)]) == 0
    there = {path.name for path in tmp_path.iterdir()}
    for deployment in of_kind(rendered(), "Deployment").values():
        (keys,) = [volume["secret"] for volume in pod(deployment)["volumes"] if volume["name"] == "keys"]
        assert keys["secretName"] == "splitserve-keys"
        assert {item["key"] for item in keys.get("items", ())} <= there
        files = [re.search(r"=/keys/(.+)$", option) for option in container(deployment)["args"]]
        assert {found[1] for found in files if found} <= there


def test_the_autoscaler_may_scale_the_pools_and_nothing_else() -> None:
    documents = rendered()
    settings = KubernetesConfig()
    assert (settings.prefill, settings.decode) == tuple(f"deployment/{name}" for name in POOLS)
    (role,) = of_kind(documents, "Role").values()
    assert role["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": list(POOLS),
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]},
    ]
    (binding,) = of_kind(documents, "RoleBinding").values()
    account = pod(of_kind(documents, "Deployment")["splitserve-autoscaler"])["serviceAccountName"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["name"] == account
    assert account in of_kind(documents, "ServiceAccount")


def test_two_releases_share_nothing() -> None:
    """Two models in one namespace: no name, selector or address of one is in the other."""
    first, second = str(rendered(release="red")), str(rendered(release="blue"))
    assert "blue" not in first.replace("splitserve-keys", "")
    assert "red-" not in second
    (role,) = of_kind(rendered(release="blue"), "Role").values()
    assert role["rules"][0]["resourceNames"] == ["blue-prefill", "blue-decode"]
    args = container(of_kind(rendered(release="blue"), "Deployment")["blue-autoscaler"])["args"]
    assert "--prefill-workload=deployment/blue-prefill" in args


@pytest.mark.parametrize("options", [(), ON_CPU, VLLM + TWO_GPUS], ids=" ".join)
def test_workers_agree_with_the_policy(options: tuple[str, ...]) -> None:
    documents = rendered(*options)
    (config,) = of_kind(documents, "ConfigMap").values()
    policy = parse_policy(yaml.safe_load(config["data"]["policy.yaml"]))
    assert policy.gpu_budget == 8
    for name, pool in zip(POOLS, (policy.prefill, policy.decode), strict=True):
        deployment = of_kind(documents, "Deployment")[name]
        part = container(deployment)
        assert f"--drain={pool.drain_s:g}" in part["args"]
        assert pod(deployment)["terminationGracePeriodSeconds"] >= pool.drain_s + 30
        limits = {"nvidia.com/gpu": pool.gpus_per_replica} if pool.gpus_per_replica else None
        assert part["resources"].get("limits") == limits
        assert ("--gpus=0,1" in part["args"]) == (pool.gpus_per_replica == 2)
        assert "replicas" not in deployment["spec"]
        assert "--worker-id=$(POD_NAME)" in part["args"]
        paths = {entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in part["env"]}
        assert paths == {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
        (service,) = of_kind(documents, "Service")
        assert f"--coordinator={service}:50051" in part["args"]


def test_vllm_has_its_image_its_model_and_its_time_to_load() -> None:
    for name in POOLS:
        part = container(of_kind(rendered(*VLLM), "Deployment")[name])
        assert part["image"] == f"splitserve/worker-vllm:{__version__}"
        assert {"--engine=vllm", "--model=Qwen/Qwen3-8B"} <= set(part["args"])
        assert part["startupProbe"]["periodSeconds"] * part["startupProbe"]["failureThreshold"] == 1800
        assert part["resources"]["requests"] == {"cpu": "2", "memory": "32Gi"}


@pytest.mark.parametrize(("other", "kind"), [("keda", "ScaledObject"), ("hpa", "HorizontalPodAutoscaler")])
def test_other_scalers_name_our_pools_and_our_metrics_and_stand_alone(other: str, kind: str) -> None:
    documents = rendered(*SCALED_BY[other])
    scalers = of_kind(documents, kind)
    assert [scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers.values()] == list(POOLS)
    assert not scales(documents)
    known = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    used = re.findall(r"splitserve_\w+", str(list(scalers.values())))
    assert used
    assert all(f"`{series}`" in known for series in used)
    assert not of_kind(rendered(*SCALED_BY["none"]), kind)


def test_prometheus_finds_every_part_under_the_names_of_the_alerts() -> None:
    documents = rendered(*ALL_PARTS)
    (monitor,) = of_kind(documents, "PodMonitor").values()
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    jobs = set()
    for deployment in of_kind(documents, "Deployment").values():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert wanted <= labels.items()
        jobs.add(labels[monitor["spec"]["jobLabel"]])
        assert "metrics" in {port["name"] for port in container(deployment)["ports"]}
    scraped = yaml.safe_load((ROOT / "compose/monitoring/prometheus.yaml").read_text())["scrape_configs"]
    assert jobs <= {job["job_name"] for job in scraped}


def test_network_policies_cover_every_pod_and_name_existing_ports() -> None:
    documents = rendered()
    pods = {
        name: (deployment["spec"]["template"]["metadata"]["labels"], container(deployment)["ports"])
        for name, deployment in of_kind(documents, "Deployment").items()
    }

    def chosen(selector: dict[str, Any]) -> set[str]:
        return {name for name, (labels, _) in pods.items() if matches(selector, labels)}

    covered: list[str] = []
    for policy in of_kind(documents, "NetworkPolicy").values():
        own = chosen(policy["spec"]["podSelector"])
        covered += own
        listens = {port["containerPort"] for name in own for port in pods[name][1]}
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule.get("ports", ())} <= listens
            for peer in rule["from"]:
                selector = peer.get("podSelector")
                clients = selector == {"matchLabels": {"splitserve-client": "true"}}
                assert selector is None or clients or chosen(selector)
    assert sorted(covered) == sorted(pods)
    workers = of_kind(documents, "NetworkPolicy")["splitserve-workers"]["spec"]
    (peers,) = [rule for rule in workers["ingress"] if "ports" not in rule]
    assert chosen(peers["from"][0]["podSelector"]) == set(POOLS), "a worker may take the other role"


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        expression["operator"] == "In" and labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", ())
    )


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("modle=x", "modle"),
        ("workers.engine=tensorrt", "engine"),
        ("workers.gpuResource=gpu", "gpuResource"),
        ("scaling=both", "scaling"),
        ("policy.decode.drain_s=-1", "drain_s"),
        ("policy.prefill.gpus_per_replica=two", "gpus_per_replica"),
        ("models.size=a lot", "size"),
        ("prefill.args={x; rm -rf /}", "args"),
        ("keys.secret=Not A Name", "secret"),
        ("coordinator.image=a", "image"),
        ("networkPolicy.clients[0].any=true", "clients"),
        ("prometheus.url=file:///etc/passwd", "url"),
    ],
)
def test_wrong_values_are_refused_by_name(value: str, named: str) -> None:
    assert named in refusal("--set", value)


@pytest.mark.parametrize("release", ["a.b", "0a", "a" * 40])
def test_a_release_whose_names_the_api_would_refuse(release: str) -> None:
    run = run_helm("template", release, str(CHART))
    assert "the release's name must have 2 to 39 of a-z" in run.stderr


def test_only_the_autoscaler_may_speak_to_the_api() -> None:
    for name, deployment in of_kind(rendered(), "Deployment").items():
        assert ("serviceAccountName" in pod(deployment)) == (name == "splitserve-autoscaler")
        assert pod(deployment).get("automountServiceAccountToken", True) == (name == "splitserve-autoscaler")


@pytest.mark.parametrize("model", ["org/na:me", 'a"b', "a: b", "-x", "it's"])
def test_a_value_stays_a_value(model: str) -> None:
    args = container(of_kind(rendered("--set-string", f"model={model}"), "Deployment")[POOLS[0]])["args"]
    assert f"--model={model}" in args


def test_the_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    images = {container(deployment)["image"] for deployment in of_kind(rendered(), "Deployment").values()}
    assert images == {f"splitserve/{name}:{__version__}" for name in ("coordinator", "worker-cpu")}
