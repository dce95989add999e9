"""Installs the pinned torch into this environment without pulling CUDA packages onto a CPU-only machine.

With an NVIDIA GPU: whatever the configured package index offers. Without one: the configured index or
local wheel folder if it offers a `+cpu` build, else PyTorch's own index of CPU builds (`--cpu-index`),
else an explanation and exit code 1, unless `--any-build` allows the CUDA build.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def pinned(constraints: Path) -> str:
    """The `torch==…` line of the constraints file."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        if line.startswith("torch=="):
            return line.strip()
    raise SystemExit(f"{constraints} does not pin torch")


def offered_version(requirement: str, *options: str) -> str | None:
    """Version that pip would install, without installing or downloading it; None if there is none."""
    # What is installed already would not be in the report.
    look = ["--dry-run", "--ignore-installed", "--no-deps", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *look]
    run = subprocess.run([*command, *options, requirement], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return None
    installs = json.loads(run.stdout)["install"]
    return str(installs[0]["metadata"]["version"]) if installs else None


def pip_options(requirement: str, *, gpu: bool, any_build: bool, cpu_index: str) -> list[str]:
    """Options for `pip install` that get the right build."""
    if gpu or any_build or sys.platform != "linux":
        return []
    if (offered_version(requirement) or "").endswith("+cpu"):
        return []
    options = ["--index-url", cpu_index]
    if offered_version(requirement, *options) is not None:
        return options
    raise SystemExit(
        f"no CPU build of {requirement} found: neither the configured package index nor {cpu_index} has one.\n"
        "Give one with `make setup TORCH_CPU_INDEX=URL`, or take the CUDA build (gigabytes) with "
        "`make setup TORCH_ANY_BUILD=1`."
    )


def main() -> None:
    """Does nothing when the pinned version is already there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--constraints", type=Path, default=Path("constraints.txt"))
    parser.add_argument("--cpu-index", default=CPU_INDEX)
    parser.add_argument("--any-build", action="store_true")
    args = parser.parse_args()
    requirement = pinned(args.constraints)
    try:
        if importlib.metadata.version("torch").split("+")[0] == requirement.removeprefix("torch=="):
            return
    except importlib.metadata.PackageNotFoundError:
        pass
    gpu = Path("/proc/driver/nvidia/version").exists()
    options = pip_options(requirement, gpu=gpu, any_build=args.any_build, cpu_index=args.cpu_index)
    # The CPU index carries torch alone; what torch needs comes from the usual index afterwards.
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        *(["--no-deps"] if options else []),
        *options,
    ]
    subprocess.run([*command, "--constraint", str(args.constraints), requirement], check=True)


if __name__ == "__main__":
    main()
