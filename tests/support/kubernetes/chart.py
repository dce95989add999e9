"""The chart in compose/helm as Helm renders it."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.system.helm import helm

CHART = Path(__file__).resolve().parents[3] / "compose" / "helm"
RELEASE = "splitserve"
RENDER_S = 60.0


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Helm. Skips the test where there is none."""
    if (program := helm()) is None:
        pytest.skip("no helm: python -m dev.system.helm")
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=RENDER_S, check=False
    )


@cache
def rendered(*options: str, release: str = RELEASE) -> tuple[dict[str, Any], ...]:
    """What `helm install RELEASE compose/helm OPTIONS` sends to the API server, as (non-empty) documents."""
    run = run_helm("template", release, str(CHART), *options)
    assert run.returncode == 0, run.stderr
    return tuple(document for document in yaml.safe_load_all(run.stdout) if document)


def refusal(*options: str) -> str:
    """What Helm says of values that it refuses."""
    run = run_helm("template", RELEASE, str(CHART), *options)
    assert run.returncode != 0
    return run.stderr


def of_kind(documents: tuple[dict[str, Any], ...], kind: str) -> dict[str, dict[str, Any]]:
    """The documents of one kind, by their names."""
    return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}
