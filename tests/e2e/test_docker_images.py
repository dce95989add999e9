"""What the images hold, and that they do with a read-only root."""

from __future__ import annotations

import os
import subprocess

import pytest

from dev.docker_image import IMAGES
from splitserve import __version__
from tests.support.scaling.docker_rig import docker_client

COORDINATOR_BYTES = 230e6
"""What the coordinator's image adds to its base image (python:3.11-slim: 125 MB), compiled modules among it."""
HEAVY = ("torch", "transformers", "nixl_cu13", "vllm", "kubernetes")
pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]


def output_of(image: str, *command: str, entrypoint: str = "splitserve-entrypoint") -> str:
    """What a container prints that may write nowhere but to /tmp."""
    locked = ("--rm", "--read-only", "--tmpfs", "/tmp:exec", "--network", "none", "--cap-drop", "ALL")
    run = ["docker", "run", *locked, "--entrypoint", entrypoint, image, *command]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("target", IMAGES)
def test_an_image_says_what_it_is_and_runs_as_nobody_special(target: str) -> None:
    client = docker_client()
    config = client.inspect_image(IMAGES[target])["Config"]  # type: ignore[no-untyped-call]
    assert config["User"] == "10001:10001"
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert output_of(IMAGES[target], "--version") == f"splitserve {__version__}"


def test_the_coordinator_is_light() -> None:
    ask = f"import importlib.util as u; print([name for name in {HEAVY} if u.find_spec(name)])"
    assert output_of(IMAGES["coordinator"], "-c", ask, entrypoint="python3") == "[]"
    client = docker_client()
    whole, base = (
        client.inspect_image(image)["Size"]  # type: ignore[no-untyped-call]
        for image in (IMAGES["coordinator"], os.environ["SPLITSERVE_E2E_BASE"])
    )
    print(f"the coordinator's image adds {(whole - base) / 1e6:.0f} MB to {base / 1e6:.0f} MB")
    assert whole - base < COORDINATOR_BYTES
