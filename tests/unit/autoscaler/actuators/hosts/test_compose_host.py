"""The compose file of one host among several, and the worked example: options, variables and the file of hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.actuators.docker_template import worker_id
from autoscaler.actuators.hosts.inventory_file import load_hosts
from splitserve.config.command_line import settings_of
from splitserve.roles import PoolName
from tests.support.scaling.service_settings import COMMANDS

FOLDER = Path(__file__).resolve().parents[5] / "compose"
TEXT = (FOLDER / "compose.host.yaml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
WORKERS = ("prefill", "decode", "prefill-gpu", "decode-gpu")
HOSTS = ("gpu-a", "gpu-b")


def settings(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def given_to(host: str) -> dict[str, str]:
    """The variables of a host."""
    files = (".env", f"hosts/{host}.env")
    return {name: value for file in files for name, value in settings(FOLDER / file).items()}


def filled(text: str, given: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda found: given[found[1]], text)


@pytest.mark.parametrize("name", [*WORKERS, "coordinator", "autoscaler"])
def test_options_and_variables_exist(name: str) -> None:
    command, *words = filled(SERVICES[name]["command"], given_to("gpu-a")).split()
    known = list(settings_of(COMMANDS[command]))
    assert {word for word in words if word.startswith("--")} <= {setting.flag for setting in known}
    given = {one for one in SERVICES[name]["environment"] if one.startswith("SPLITSERVE_")}
    beside = {"SPLITSERVE_CLUSTER_TOKEN_FILE", "SPLITSERVE_GPU"}
    assert given <= {setting.variable for setting in known} | beside


@pytest.mark.parametrize("host", HOSTS)
def test_every_variable_has_a_value(host: str) -> None:
    assert set(re.findall(r"\$\{(\w+)", TEXT)) <= set(given_to(host))


def test_workers_of_both_pools_and_hosts_have_ids_of_their_own() -> None:
    pools: tuple[tuple[str, PoolName], ...] = (("prefill-gpu", "prefill"), ("decode-gpu", "decode"))
    ids = set()
    for host in HOSTS:
        given = given_to(host)
        for service, pool in pools:
            command = filled(SERVICES[service]["command"], given).split()
            hostname = filled(SERVICES[service]["hostname"], given)
            ids.add(worker_id({"Config": {"Cmd": command, "Hostname": hostname}}, pool))
    assert len(ids) == 4


def test_the_example_is_what_the_page_shows() -> None:
    file = load_hosts(FOLDER / "hosts/hosts.yaml")
    for host in file.hosts:
        given = settings(FOLDER / "hosts" / f"{host.name}.env")
        assert (given["HOST_NAME"], given["HOST_ADDRESS"]) == (host.name, host.address)
        ports = {int(value) for name, value in given.items() if name.endswith("_PORT")}
        assert not ports & set(range(host.ports.first, host.ports.last + 1))
    shown = "\n".join((FOLDER / "hosts/hosts.yaml").read_text().splitlines()[1:])
    page = (FOLDER.parent / "docs/quickstart/several-hosts.md").read_text()
    assert "\n".join(f"    {line}" for line in shown.splitlines()) in page


@pytest.mark.parametrize("name", WORKERS)
def test_workers_may_gain_nothing_and_only_the_autoscaler_has_a_socket(name: str) -> None:
    worker = SERVICES[name]
    assert worker["network_mode"] == "host"
    assert worker["cap_drop"] == ["ALL"]
    assert worker["security_opt"] == ["no-new-privileges:true"]
    holders = [one for one, service in SERVICES.items() if "docker.sock" in str(service.get("volumes"))]
    assert holders == ["autoscaler"]
