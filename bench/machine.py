"""Facts about the machine, and how much of it other processes use during a measurement."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from launcher.cluster.placement import available_cores
from splitserve import __version__
from splitserve.host_facts import read_host_facts

PACKAGES = ("torch", "transformers", "nixl-cu13", "grpcio", "numpy")
SPEED_PIECE_S = 0.05


@dataclass(frozen=True)
class Machine:
    """`load_average` covers the last minute: it reveals a busy machine."""

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
    """The object that `--json` prints, with the fields common to all benchmarks."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"benchmark": benchmark, "date": date, "command": command, "machine": asdict(machine), **content}


def show_content(
    benchmark: str, module: str, machine: Machine, content: Mapping[str, Any], *, as_json: bool
) -> None:
    """Prints what a benchmark has found: the object of `report`, or a line for each part and each of its rows."""
    if as_json:
        command = shlex.join(["python", "-m", module, *sys.argv[1:]])
        print(json.dumps(report(benchmark, command, machine, **content), indent=2))
        return
    for name, value in content.items():
        for row in value if isinstance(value, list) else [value]:
            print(name, row)


def core_speed_mb_per_s(pieces: int = 9) -> float:
    """How fast one core hashes (SHA-256) now, in MB/s: the median of short pieces, half a second in all.

    It stands beside a figure to tell whether two of them were taken on an equally fast machine.
    """
    data, rates = bytes(2**20), []
    for _ in range(pieces):
        began_s, hashed = time.perf_counter(), 0
        while time.perf_counter() - began_s < SPEED_PIECE_S:
            hashlib.sha256(data)
            hashed += 1
        rates.append(hashed * len(data) / 1e6 / (time.perf_counter() - began_s))
    return round(median(rates), 1)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


class StolenTime:
    """How much of the cores' time the host of a virtual machine gave to others (`steal` in proc(5)), at its worst."""

    WINDOW_S = 10.0

    def __init__(self) -> None:
        self._cores = psutil.cpu_count() or 1
        self._looks: deque[tuple[float, float]] = deque()
        self.peak = 0.0
        """The largest share of all cores, 0..1, within `WINDOW_S`, of the looks so far."""

    def look(self, now: float, stolen_s: float) -> None:
        """Takes the counter `psutil.cpu_times().steal`, once a second or so."""
        looks = self._looks
        looks.append((now, stolen_s))
        while len(looks) > 2 and now - looks[1][0] >= self.WINDOW_S:
            looks.popleft()
        (since_s, before), (_, after) = looks[0], looks[-1]
        if now - since_s >= self.WINDOW_S:
            self.peak = max(self.peak, (after - before) / ((now - since_s) * self._cores))


class OtherLoad:
    """CPU time of all other processes (not children) since the last `mark`."""

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._cores = psutil.cpu_count() or 1
        self.mark()

    def mark(self) -> None:
        """Restarts the measurement."""
        self._others_s, self._since_s = self._others(), time.monotonic()

    def share(self) -> float:
        """Share of all cores, 0..1. Accurate to a few hundredths over a second: the kernel counts ticks."""
        passed_s = time.monotonic() - self._since_s
        return max(0.0, (self._others() - self._others_s) / (passed_s * self._cores))

    def _others(self) -> float:
        whole = psutil.cpu_times()
        busy_s = sum(whole) - whole.idle - whole.iowait - whole.guest - whole.guest_nice
        ours = [self._self, *self._self.children(recursive=True)]
        return float(busy_s - sum(sum(process.cpu_times()[:2]) for process in ours))
