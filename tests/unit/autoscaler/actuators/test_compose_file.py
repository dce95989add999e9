"""The compose file, read as it stands: nobody gets in without keys, and every variable is documented."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.policies.policy_file import load_policy
from engine.vllm.boot import SUPPORTED
from launcher.cli.own_packages import PACKAGES
from splitserve import __version__
from splitserve.config.command_line import settings_of
from splitserve.extras import NIXL, installed
from tests.support.scaling.service_settings import COMMANDS

FOLDER = Path(__file__).resolve().parents[4] / "compose"
TEXT = (FOLDER / "compose.yaml").read_text()
MPS = (FOLDER / "compose.mps.yaml").read_text()
BUILD = (FOLDER / "compose.build.yaml").read_text()
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
BUILDS: dict[str, dict[str, Any]] = yaml.safe_load(BUILD)["services"]
TARGETS = {"COORDINATOR_IMAGE": "coordinator", "WORKER_IMAGE": "worker", "VLLM_IMAGE": "worker-vllm"}
"""By the setting that names the image: the target of the Dockerfile."""
SETTINGS = dict(
    line.split("=", 1)
    for line in (FOLDER / ".env").read_text().splitlines()
    if line and not line.startswith("#")
)


def words_of(service: dict[str, Any]) -> list[str]:
    """Its command's, with what stands in for the pools' command."""
    command = service.get("command")
    if not isinstance(command, str):
        return [""]
    return re.sub(r"\$\{(\w+_COMMAND)\}", lambda found: SETTINGS[found[1]], command).split()


PARTS = {name: words for name, service in SERVICES.items() if (words := words_of(service))[0] in COMMANDS}

WORKERS = [name for name, words in PARTS.items() if words[0].endswith("worker")]


def environment(name: str) -> dict[str, Any]:
    given = SERVICES[name].get("environment", {})
    return dict(entry.partition("=")[::2] for entry in given) if isinstance(given, list) else given


def variables_in(value: object) -> set[str]:
    return set(re.findall(r"\$\{(\w+)", str(value)))


def test_all_services_are_there() -> None:
    assert set(PARTS) == {
        "coordinator",
        "prefill",
        "decode",
        "worker",
        "autoscaler",
        "prefill-gpu",
        "decode-gpu",
        "autoscaler-gpu",
        "prefill-vllm",
        "decode-vllm",
        "autoscaler-vllm",
    }


@pytest.mark.parametrize("name", PARTS)
def test_options_exist(name: str) -> None:
    command, *words = PARTS[name]
    known = {setting.flag for setting in settings_of(COMMANDS[command])}
    assert [word for word in words if word.startswith("--") and word not in known] == []


@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_the_cluster_token(name: str) -> None:
    assert environment(name)["SPLITSERVE_CLUSTER_TOKEN_FILE"] == "/keys/cluster_token"
    assert "${KEYS}:/keys:ro" in SERVICES[name]["volumes"]


def test_the_keys_are_made_before_anybody_listens() -> None:
    assert SERVICES["keys"]["command"] == ["keys", "init", "/keys"]
    made = {"condition": "service_completed_successfully"}
    assert SERVICES["coordinator"]["depends_on"]["keys"] == made
    for name in WORKERS:
        assert SERVICES[name]["depends_on"]["coordinator"] == {"condition": "service_healthy"}


def test_clients_need_an_api_key() -> None:
    words = PARTS["coordinator"]
    assert words[words.index("--tenants") + 1] == "/keys/tenants.yaml"


def test_what_asks_for_no_password_stays_on_this_host() -> None:
    published = {name: port for name, service in SERVICES.items() for port in service.get("ports", ())}
    for name, port in published.items():
        if name not in ("coordinator", "grafana"):
            assert port.startswith("127.0.0.1:"), name
    assert SETTINGS["BIND_ADDRESS"] == "127.0.0.1"


def test_no_secret_has_a_default() -> None:
    assert not {
        name: value for name, value in SETTINGS.items() if re.search("TOKEN|KEY$|PASSWORD", name) and value
    }
    grafana = environment("grafana")
    assert grafana["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/keys/grafana_password"
    assert not [name for name in grafana if "ANONYMOUS" in name]


def test_only_the_autoscaler_has_the_socket_and_it_may_read_the_keys() -> None:
    holders = {name for name, service in SERVICES.items() if "docker.sock" in str(service.get("volumes"))}
    assert holders == {"autoscaler", "autoscaler-gpu", "autoscaler-vllm"}
    for name in holders:
        assert SERVICES[name]["group_add"] == ["10001"]


def test_every_variable_is_in_the_documented_file_and_used() -> None:
    used = variables_in(TEXT) | variables_in(MPS) | variables_in(BUILD)
    assert used == set(SETTINGS) - {"COMPOSE_PROFILES"}


def test_the_policy_is_valid() -> None:
    load_policy(FOLDER / "policy.yaml")


@pytest.mark.parametrize("name", [name for name in WORKERS if name.partition("-")[2]])
def test_a_worker_on_gpus_is_told_its_own_and_sees_all(name: str) -> None:
    pool = name.partition("-")[0]
    given = environment(name)["SPLITSERVE_GPU"]
    assert given == f"${{{pool.upper()}_GPU}}"
    assert SERVICES[name]["labels"] == {"splitserve.pool": pool, "splitserve.gpu": given}
    (request,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
    assert request == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_variables_of_the_parts_are_settings() -> None:
    for name, words in PARTS.items():
        known = {setting.variable for setting in settings_of(COMMANDS[words[0]])}
        ours = {variable for variable in environment(name) if variable.startswith("SPLITSERVE_")}
        assert ours - {"SPLITSERVE_CLUSTER_TOKEN_FILE"} <= known, name


def test_the_profile_vllm_has_an_image_of_its_own() -> None:
    for name in ("prefill-vllm", "decode-vllm"):
        service = SERVICES[name]
        assert service["profiles"] == ["vllm"]
        assert service["image"] == "${VLLM_IMAGE}"
        words = PARTS[name]
        assert words[words.index("--engine") + 1] == "vllm"
    assert SERVICES["autoscaler-vllm"]["depends_on"] == ["coordinator", "prefill-vllm", "decode-vllm"]


def test_workers_of_role_both_are_scaled_by_hand() -> None:
    """No label of a pool: an autoscaler that runs beside them leaves them alone."""
    service = SERVICES["worker"]
    assert service["profiles"] == ["both"]
    assert service["restart"] == "unless-stopped", "no autoscaler replaces them"
    assert "labels" not in service
    assert service["pid"] == service["ipc"] == "service:namespaces"
    assert not [name for name, other in SERVICES.items() if "worker" in other.get("depends_on", ())]


def test_mps_changes_workers_on_gpus_alone() -> None:
    changed = yaml.safe_load(MPS)["services"]
    assert set(changed) == {name for name in WORKERS if name.partition("-")[2]}
    for service in changed.values():
        assert service["ipc"] == "host"
        assert service["volumes"] == ["${MPS_PIPE}:" + service["environment"]["CUDA_MPS_PIPE_DIRECTORY"]]


def test_images_are_named_by_release_and_built_only_with_the_overlay() -> None:
    ours = {name: service for name, service in SERVICES.items() if name not in ("prometheus", "grafana")}
    assert set(BUILDS) == set(ours)
    for name, service in ours.items():
        assert "build" not in service
        image = service["image"].strip("${}")
        assert BUILDS[name]["build"]["target"] == TARGETS[image]
        assert SETTINGS[image].endswith(f":{__version__}")
    assert set(re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, re.MULTILINE)) == {__version__}
    assert set(TARGETS.values()) <= set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))


def test_nothing_writes_to_its_root() -> None:
    for name, service in SERVICES.items():
        if name not in ("prometheus", "grafana"):
            assert service["read_only"], name
            assert service["tmpfs"] == ["/tmp:exec,mode=1777"]


def test_the_image_for_gpus_has_what_triton_compiles_with() -> None:
    """Its check for Python.h is run here, on this Python."""
    last = re.split("\nFROM .* AS worker\n", DOCKERFILE)[1]
    assert last.index("ARG TORCH") < last.index("gcc libc6-dev")
    (check,) = re.findall(r"has_header='([^']+)'", last)
    there = Path(sysconfig.get_path("include"), "Python.h").exists()
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == (0 if there else 1)


def test_the_vllm_image_stands_on_the_version_of_vllm_that_is_tested() -> None:
    base = f"vllm/vllm-openai:v{SUPPORTED[-1]}.0"
    assert f"\nARG VLLM_BASE_IMAGE={base}\n" in DOCKERFILE
    assert "\nFROM ${VLLM_BASE_IMAGE} AS worker-vllm\n" in DOCKERFILE
    assert SETTINGS["VLLM_BASE_IMAGE"] == base


def test_the_vllm_image_has_nixl_even_if_its_base_has_none() -> None:
    """The check is run here, on this Python."""
    extras = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = [line.partition(";")[0] for line in extras["vllm"] if line.startswith("nixl")]
    (check,) = re.findall(rf"-P -c '([^']+)' \\\n +\|\| python3 -m pip install .* '{wanted}'; }}", DOCKERFILE)
    done = subprocess.run([sys.executable, "-c", check], cwd=FOLDER.parent, check=False)
    assert done.returncode == (0 if any(map(installed, NIXL)) else 1)


def test_every_stage_with_pip_declares_its_settings() -> None:
    """The classic builder gives a stage no arguments of the stage that it stands on."""
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        declared = re.findall(r"^ARG (PIP_\w+)$", stage, re.MULTILINE)
        wanted = ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"] if "-m pip " in stage else []
        assert declared == wanted, stage.partition("\n")[0]


def test_the_images_hold_every_package_and_run_as_the_same_user() -> None:
    assert sorted(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE)) == sorted(PACKAGES)
    _, *parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    stages = dict(zip(parts[::2], parts[1::2], strict=True))
    for name in ("common", "worker", "worker-vllm"):
        assert re.findall("^USER (.*)$", stages[name], re.MULTILINE)[-1] == "10001:10001"
    ours, theirs = (
        re.findall(r"^(?:ENTRYPOINT|CMD) .*$|HOME=/tmp SPLITSERVE_HOME=.*$", stages[name], re.MULTILINE)
        for name in ("common", "worker-vllm")
    )
    assert ours == theirs
    assert len(ours) == 3
