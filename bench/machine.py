"""On what a measurement ran."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from splitserve import __version__
from splitserve.core_layout import available_cores
from splitserve.host_facts import read_host_facts

PACKAGES = ("torch", "transformers", "nixl-cu13", "grpcio", "numpy")


@dataclass(frozen=True)
class Machine:
    """`load_average` is that of the minute before, to tell a busy machine."""

    cpu: str
    cores: int
    memory_gib: float
    gpus: int
    kernel: str
    load_average: float
    versions: dict[str, str] = field(default_factory=dict)


def this_machine() -> Machine:
    """The facts of this machine, now."""
    versions = {"splitserve": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Machine(
        cpu=_cpu_model(),
        cores=len(available_cores()),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=read_host_facts().gpus,
        kernel=platform.release(),
        load_average=round(os.getloadavg()[0], 2),
        versions=versions,
    )


def report(benchmark: str, command: str, machine: Machine, **content: Any) -> dict[str, Any]:
    """The object that `--json` prints, with what every benchmark says about itself."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"benchmark": benchmark, "date": date, "command": command, "machine": asdict(machine), **content}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
