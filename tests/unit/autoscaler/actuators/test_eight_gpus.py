"""The worked example of docs/guides/gpus.md: its files agree, and its replicas get the GPUs that the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.actuators.actuator import ReplicaShape
from autoscaler.actuators.docker import DockerActuator
from autoscaler.actuators.hosts.make_hosts import docker_gpus
from autoscaler.policies.policy_file import load_policy
from splitserve.config.autoscaler import DockerConfig
from splitserve.config.gpu_list import gpu_names
from tests.support.scaling.docker_engine import FakeDocker

COMPOSE = Path(__file__).resolve().parents[4] / "compose"
EXAMPLE = COMPOSE / "eight-gpus"
PAGE = (COMPOSE.parent / "docs" / "guides" / "gpus.md").read_text()


def settings(*files: Path) -> dict[str, str]:
    lines = [line for file in files for line in file.read_text().splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


BASE = settings(COMPOSE / ".env")
GIVEN = settings(COMPOSE / ".env", EXAMPLE / "gpus.env")
POLICY = load_policy(EXAMPLE / "policy.yaml")
POOLS = {"prefill": POLICY.prefill, "decode": POLICY.decode}


def filled(value: Any) -> Any:
    """With variables put in, as compose does it."""
    if isinstance(value, dict):
        return {key: filled(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [filled(entry) for entry in value]
    return re.sub(r"\$\{(\w+)\}", lambda found: GIVEN[found[1]], value) if isinstance(value, str) else value


SERVICES: dict[str, dict[str, Any]] = filled(
    yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
)
ACTIVE = {name: s for name, s in SERVICES.items() if GIVEN["COMPOSE_PROFILES"] in s.get("profiles", ["vllm"])}


def test_it_changes_settings_that_exist() -> None:
    assert set(settings(EXAMPLE / "gpus.env")) <= set(BASE)
    assert (COMPOSE / GIVEN["POLICY"]).resolve() == EXAMPLE / "policy.yaml"


def test_its_services_depend_on_each_other_alone() -> None:
    assert {"prefill-vllm", "decode-vllm", "autoscaler-vllm", "coordinator"} <= set(ACTIVE)
    for service in ACTIVE.values():
        assert set(service.get("depends_on", ())) <= set(ACTIVE)


@pytest.mark.parametrize("pool", POOLS)
def test_the_first_replicas_have_as_many_gpus_as_the_policy_says(pool: str) -> None:
    service = ACTIVE[f"{pool}-vllm"]
    assert len(gpu_names(service["environment"]["SPLITSERVE_GPU"])) == POOLS[pool].gpus_per_replica


async def test_the_replicas_get_the_gpus_that_the_page_shows() -> None:
    """As the autoscaler starts them, beside those that compose has started."""
    docker = FakeDocker()
    for pool in POOLS:
        service = ACTIVE[f"{pool}-vllm"]
        docker.runs(f"{pool}-vllm", pool, service["labels"], service["command"].split()[1:])
    inventory = docker_gpus(DockerConfig(gpus=ACTIVE["autoscaler-vllm"]["environment"]["SPLITSERVE_GPUS"]))
    actuator = DockerActuator(docker, docker.project, inventory)  # type: ignore[arg-type]
    assert actuator.gpu_inventory == POLICY.gpu_budget == POLICY.least_gpus == 8
    for pool, rules in POOLS.items():
        await actuator.start(pool, rules.min_replicas - 1, ReplicaShape(rules.gpus_per_replica))  # type: ignore[arg-type]
    shown = sorted(re.findall(r"^\| `splitserve-(\w+)-vllm-(\d)` \| ([\d,]+) \|", PAGE, re.MULTILINE))
    made = sorted(
        (labels["splitserve.pool"], labels["com.docker.compose.container-number"], labels["splitserve.gpu"])
        for labels in (container["Config"]["Labels"] for container in docker.there.values())
    )
    assert made == shown
    assert len(shown) == 5
    for container in docker.there.values():
        own = set(container["Config"]["Labels"]["splitserve.gpu"].split(","))
        assert len(own) == 1 or frozenset(own) in inventory.links
