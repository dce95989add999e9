"""The images that `make e2e-docker` tests, built without asking more of the network than pip and debootstrap do.

Wheels are downloaded on the host, with the host's own pip settings, certificates and proxies, and the build takes them
from compose/wheels. The base image is pulled where a registry of images can be reached, and otherwise made from
Debian's packages.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dev.install_torch import CPU_INDEX, pinned, pip_options

WHEELS = Path("compose/wheels")
KERNELS = Path("compose/kernels")
DEFAULT_BASE = "python:3.11-slim"
MADE_BASE = "splitserve-base:debian"
IMAGES: Mapping[str, str] = MappingProxyType(
    {
        "coordinator": "splitserve/coordinator:e2e",
        "worker": "splitserve/worker-cpu:e2e",
        "worker-vllm": "splitserve/worker-vllm:e2e",
    }
)
"""By target of compose/Dockerfile. The workers' image stands in for vLLM's own, which is too large for a test."""
EXTRAS = "cpu,docker,harmony,kubernetes,nvml,tracing"
OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
LABEL = "splitserve.e2e"
PULL_S = 120
PRUNE_S = 120
NOT_IN_BASE = ("./var/cache/apt/*", "./var/lib/apt/lists/*", "./usr/share/doc/*", "./usr/share/man/*")


def download_wheels(cpu_index: str, python: str = OWN_PYTHON) -> None:
    """Everything that the images install, with the CPU build of torch, into compose/wheels, for this Python ("3.11").

    Does nothing when that was done for the same requirements.
    """
    constraints, project = Path("constraints.txt"), Path("pyproject.toml")
    wanted = hashlib.sha256(constraints.read_bytes() + project.read_bytes() + python.encode()).hexdigest()
    stamp = WHEELS / ".complete"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    torch = pinned(constraints)
    options = pip_options(torch, gpu=False, any_build=False, cpu_index=cpu_index)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    download += ["--dest", str(WHEELS), "--only-binary=:all:"]
    if python != OWN_PYTHON:
        download += ["--python-version", python]
    subprocess.run([*download, "--no-deps", *options, torch], check=True)
    sources = ["--find-links", str(WHEELS), "--constraint", str(constraints)]
    subprocess.run([*download, *sources, torch, "setuptools>=77", f".[{EXTRAS}]"], check=True)
    stamp.write_text(wanted)


def compile_kernels() -> None:
    """The cpu kernels for the images into compose/kernels, where this machine has a compiler; else the build does."""
    subprocess.run([sys.executable, "-m", "engine.backends.cpu.build", str(KERNELS)], check=False)


def python_of(image: str) -> str:
    """The version of an image's Python, as "3.11"."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    command = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "python3", image, "-c", ask]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def base_image() -> str:
    """Name of a local base image."""
    for image in (DEFAULT_BASE, MADE_BASE):
        if _succeeds(["docker", "image", "inspect", image]):
            return image
    if _succeeds(["docker", "pull", "--quiet", DEFAULT_BASE], PULL_S):
        return DEFAULT_BASE
    print(f"{DEFAULT_BASE} cannot be pulled: making {MADE_BASE} with debootstrap", flush=True)
    suite = re.search(r"^VERSION_CODENAME=(\S+)$", Path("/etc/os-release").read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="splitserve-base-") as folder:
        root = Path(folder) / "root"
        packages = "--include=python3,python3-venv,ca-certificates"
        command = ["debootstrap", "--variant=minbase", packages, suite[1] if suite else "stable", str(root)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise SystemExit(f"debootstrap failed:\n{made.stdout[-3000:]}{made.stderr[-1000:]}")
        left_out = [f"--exclude={path}" for path in NOT_IN_BASE]
        tar = subprocess.Popen(["tar", "-C", str(root), *left_out, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(
            ["docker", "import", "-", MADE_BASE], stdin=tar.stdout, check=True, capture_output=True
        )
        if tar.wait() != 0:
            raise SystemExit("tar failed")
    return MADE_BASE


def build(base: str) -> Mapping[str, str]:
    """Builds the images on this base from compose/wheels; returns their names by target. Docker's cache makes
    repetitions fast."""
    # The other stages get names, so that their layers stay for the next time.
    for stage in ("build", "wheel", "build-coordinator", "build-worker"):
        _build(base, stage, f"splitserve/{stage}:e2e")
    for target, tag in IMAGES.items():
        _build(base, target, tag)
    # Untagged images of earlier builds would fill the disk over time.
    _succeeds(["docker", "image", "prune", "--force", "--filter", f"label={LABEL}"], PRUNE_S)
    return IMAGES


def _build(base: str, target: str, tag: str) -> None:
    command = ["docker", "build", "--quiet", "--file", "compose/Dockerfile", "--tag", tag, "--label", LABEL]
    arguments = {"BASE_IMAGE": base, "VLLM_BASE_IMAGE": IMAGES["worker"], "PIP_NO_INDEX": "1"}
    command += [word for pair in arguments.items() for word in ("--build-arg", "=".join(pair))]
    # Every Engine has the classic builder; BuildKit's client is a separate package.
    classic = os.environ | {"DOCKER_BUILDKIT": "0"}
    built = subprocess.run(
        [*command, "--target", target, "."], env=classic, capture_output=True, text=True, check=False
    )
    if built.returncode != 0:
        raise SystemExit(f"docker build of {target} failed:\n{built.stdout[-3000:]}{built.stderr[-3000:]}")


def _succeeds(command: list[str], timeout_s: float = 30) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout_s, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> None:
    """`python -m dev.docker_image`: only the wheels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-index", default=CPU_INDEX)
    parser.add_argument("--python", default=OWN_PYTHON, help="version in the base image, as 3.11")
    args = parser.parse_args()
    download_wheels(args.cpu_index, args.python)
    compile_kernels()


if __name__ == "__main__":
    main()
