"""How long this process took to start, by phases."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from splitserve.v1 import registry_pb2

_STAT = Path("/proc/self/stat")
_AFTER_NAME = 19
"""Index of the start time among the fields of `stat` that follow the command's name; see proc_pid_stat(5)."""


def process_age_s() -> float:
    """Time since this process was made, in seconds: to 0.01 on Linux, elsewhere as psutil knows it.

    A program that was executed in place of another is as old as that; a forked process is as old as the fork.
    """
    try:
        fields = _STAT.read_text().rpartition(")")[2].split()
    except OSError:
        return max(0.0, time.time() - psutil.Process().create_time())
    ticks = int(fields[_AFTER_NAME])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


@dataclass(frozen=True, slots=True)
class StartPhases:
    """The phases of a start, in seconds; each begins where the one before ends."""

    process_s: float
    """From the start of the process until its code is imported."""
    weights_s: float
    """Until the weights are read, checked and packed."""
    warm_up_s: float
    """Until the engine is ready: memory for KV, kernels, captured steps, and the first steps."""
    weights_from: str = ""
    """Where the weights came from: "disk", "kept" or "peer"; empty: there are none, or it is not known."""

    @property
    def total_s(self) -> float:
        """From the start of the process until the engine is ready."""
        return self.process_s + self.weights_s + self.warm_up_s

    def logged(self) -> dict[str, float | str]:
        """As a log event has them: `fields`, and where the weights came from, if it is known."""
        return {**self.fields(), **({"weights_from": self.weights_from} if self.weights_from else {})}

    def fields(self) -> dict[str, float]:
        """The seconds of each phase, to milliseconds."""
        seconds = {"process": self.process_s, "weights": self.weights_s, "warm_up": self.warm_up_s}
        return {phase: round(took_s, 3) for phase, took_s in seconds.items()}

    def to_proto(self) -> registry_pb2.StartPhases:
        """As a registration has it."""
        return registry_pb2.StartPhases(
            process_seconds=self.process_s,
            weights_seconds=self.weights_s,
            warm_up_seconds=self.warm_up_s,
            weights_from=self.weights_from,
        )


class StartClock:
    """Takes the time between the phases of this process's start. Used on one thread at a time."""

    def __init__(self, age_s: Callable[[], float] = process_age_s) -> None:
        """`age_s`: the time since the process began, in seconds."""
        self._age_s = age_s
        self._imported_s = self._loaded_s = 0.0
        self._weights_from = ""

    def imported(self) -> None:
        """All code is imported, and the weights are read next."""
        self._imported_s = self._loaded_s = self._age_s()

    def loaded(self, weights_from: str = "") -> None:
        """The weights are in memory."""
        self._loaded_s, self._weights_from = self._age_s(), weights_from

    def ready(self) -> StartPhases:
        """The engine is ready."""
        ready_s = self._age_s()
        imported_s, loaded_s = self._imported_s or ready_s, self._loaded_s or ready_s
        phases = imported_s, loaded_s - imported_s, ready_s - loaded_s
        return StartPhases(*phases, self._weights_from)
