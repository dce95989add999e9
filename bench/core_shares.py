"""Shares of a core for processes, by Linux's control groups (both versions): workers are worth the same, however many.

Needs root. Formats: the kernel's documents `admin-guide/cgroup-v2` and `scheduler/sched-bwc` (version 1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from splitserve.errors import ConfigError

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 5_000
"""Period of the limit, short beside a decode step. A worker that has used up its share rests until the next one."""
WEIGHT = 10_000
"""A hundred times the weight of other processes, so that they do not take from the shares."""


class CoreShares:
    """The control groups of a bench, which go before all other processes. Each process with a share has a group. The
    bench, and what it starts, has a group without a limit."""

    def __init__(self, folder: Path, share: float, *, unified: bool) -> None:
        self._folder, self._share, self._unified = folder, share, unified
        self._limited: set[int] = set()
        self._free = folder / "free"
        self._free.mkdir()
        _move(os.getpid(), self._free)

    def limit(self, pid: int) -> None:
        """Limits a process with all its threads to the share. Does nothing for one that is limited or has ended."""
        if pid in self._limited:
            return
        self._limited.add(pid)
        group = self._folder / str(pid)
        group.mkdir()
        quota = round(self._share * PERIOD_US)
        if self._unified:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        _move(pid, group)

    def close(self) -> None:
        """Removes the groups in the folder. The groups of processes that still run stay."""
        _move(os.getpid(), self._folder.parent)
        for group in [*(self._folder / str(pid) for pid in self._limited), self._free]:
            _remove(group)


def _move(pid: int, group: Path) -> None:
    with suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid))


@contextmanager
def core_shares(share: float) -> Iterator[CoreShares]:
    """Control groups beside that of this process. Raises ConfigError where the process may not make them."""
    unified = (CGROUPS / "cgroup.controllers").exists()
    top = CGROUPS if unified else CGROUPS / "cpu"
    folder = top / f"splitserve-bench-{os.getpid()}"
    with ExitStack() as stack:
        try:
            folder.mkdir()
            stack.callback(_remove, folder)
            if unified:
                (top / "cgroup.subtree_control").write_text("+cpu")
                (folder / "cgroup.subtree_control").write_text("+cpu")
                (folder / "cpu.weight").write_text(str(WEIGHT))
            else:
                (folder / "cpu.shares").write_text(str(WEIGHT * 10))
            shares = CoreShares(folder, share, unified=unified)
        except OSError as error:
            message = f"{folder}: control groups are needed for shares of a core: {error.strerror}"
            raise ConfigError(message) from None
        stack.callback(shares.close)
        yield shares


def _remove(group: Path) -> None:
    with suppress(OSError):  # a process in it still runs
        group.rmdir()
