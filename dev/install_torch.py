"""Installs the pinned torch into this environment without pulling CUDA packages onto a CPU-only machine.

With an NVIDIA GPU: whatever the configured package index offers. Without one: the configured index or
local wheel folder if it offers a `+cpu` build, else PyTorch's own index of CPU builds (`--cpu-index`),
else an explanation and exit code 1, unless `--any-build` allows the CUDA build.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from pathlib import Path

from dev.installer import NO_COMPILE, install

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def pinned(constraints: Path) -> str:
    """The `torch==…` line of the constraints file."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        if line.startswith("torch=="):
            return line.strip()
    raise SystemExit(f"{constraints} does not pin torch")


def offered_version(requirement: str, *options: str) -> str | None:
    """Version that would be installed, without installing or downloading it; None if there is none."""
    name = requirement.partition("==")[0]
    # An installed version would not be reported.
    look = ["--dry-run", "--no-deps", "--force-reinstall", *options, requirement]
    run = install(look, check=False)
    # "Would install torch-2.9.0+cpu" of pip, " + torch==2.9.0+cpu" of uv.
    match = re.search(rf"(?:Would install| \+) {name}(?:-|==)(\S+)", run.stdout + run.stderr)
    return match[1] if match and run.returncode == 0 else None


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
    parser.add_argument(NO_COMPILE, action="store_true")
    args = parser.parse_args()
    requirement = pinned(args.constraints)
    try:
        if importlib.metadata.version("torch").split("+")[0] == requirement.removeprefix("torch=="):
            return
    except importlib.metadata.PackageNotFoundError:
        pass
    gpu = Path("/proc/driver/nvidia/version").exists()
    options = pip_options(requirement, gpu=gpu, any_build=args.any_build, cpu_index=args.cpu_index)
    # The CPU index has torch only; its dependencies come from the default index afterwards.
    alone = ["--no-deps"] if options else []
    compiled = [NO_COMPILE] if args.no_compile else []
    install([*alone, *compiled, *options, "--constraint", str(args.constraints), requirement])


if __name__ == "__main__":
    main()
