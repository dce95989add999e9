"""The worked example of docs/docker.md: neutral workers in both pools, which the autoscaler takes for such."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from autoscaler.actuators.worker_kind import runs_neutral
from autoscaler.policies.policy_file import load_policy
from splitserve.config.command_line import settings_of
from splitserve.config.worker import WorkerConfig

COMPOSE = Path(__file__).resolve().parents[4] / "compose"
EXAMPLE = COMPOSE / "neutral"
SERVICES = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]


def settings(file: Path) -> dict[str, str]:
    lines = file.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


GIVEN = settings(EXAMPLE / "neutral.env")


def test_it_changes_settings_that_exist() -> None:
    assert set(GIVEN) <= set(settings(COMPOSE / ".env"))
    policy = load_policy(COMPOSE / GIVEN["POLICY"])
    assert policy.workers == "neutral"
    assert policy.prefill.gpus_per_replica == policy.decode.gpus_per_replica


@pytest.mark.parametrize("service", ["prefill", "decode", "prefill-gpu", "decode-gpu"])
def test_each_pool_runs_what_the_policy_starts(service: str) -> None:
    command = str(SERVICES[service]["command"])
    variable = f"{service.partition('-')[0].upper()}_COMMAND"
    words = command.replace(f"${{{variable}}}", GIVEN[variable]).split()
    assert runs_neutral(words) is True
    known = {setting.flag for setting in settings_of(WorkerConfig)}
    assert {word for word in words if word.startswith("--")} <= known
    assert ("--leaning decode" in " ".join(words)) == service.startswith("decode")
