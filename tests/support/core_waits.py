"""How long processes were ready to run and had no core: what tells a slow machine from a cluster that does wrong."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.support.cluster.real_cluster import Cluster

STALL_S = 0.1
"""A process without a core for so long in all may have been late for what is due within some heartbeats."""


class CoreWaits:
    """Counts from when it is made."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._before = {pid: waited_s(pid) for pid in pids}

    def longest_s(self) -> float:
        """Of the process that waited longest; infinite where the kernel does not tell: any machine may be slow then."""
        if not Path("/proc/self/schedstat").exists():
            return math.inf
        return max(waited_s(pid) - before for pid, before in self._before.items())

    def assert_slow(self, what: str) -> None:
        """Call it before something is tried once more. Raises AssertionError where the processes had their cores."""
        longest_s = self.longest_s()
        assert longest_s >= STALL_S, (
            f"{what}, and no process waited for a core for more than {longest_s:.3f} s"
        )


def cluster_waits(cluster: Cluster) -> CoreWaits:
    """Of a cluster's processes and of this one."""
    return CoreWaits([os.getpid(), *(member.process.pid for member in cluster.members.values())])


def waited_s(pid: int) -> float:
    """Of all threads that a process has now, since they began."""
    waited_ns = 0
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, or one of its threads
        for thread in Path(f"/proc/{pid}/task").iterdir():
            waited_ns += int((thread / "schedstat").read_text().split()[1])
    return waited_ns / 1e9
