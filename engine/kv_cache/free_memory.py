"""How much memory this process may still take, from the kernel's figures and the limits of its control groups.

Formats: proc(5), and the kernel's documents `admin-guide/cgroup-v2` and `admin-guide/cgroup-v1/memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from splitserve.errors import ConfigError

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_KIB = 1024


class _Files(NamedTuple):
    """Where a version of control groups keeps its figures; `cache`: lines of `memory.stat` that count page cache."""

    limit: str
    used: str
    cache: tuple[str, ...]


_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def free_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes: the least of what the machine has available and what each limit above this process leaves.

    Page cache, which the kernel gives up for it, counts as free; swap does not. None: nothing is known.
    """
    machine = _line(proc / "meminfo", "MemAvailable:")
    known = [] if machine is None else [machine * _KIB]
    for folder, files in _groups(proc, cgroups):
        limit, used = _number(folder / files.limit), _number(folder / files.used)
        if limit is not None and used is not None:
            cache = sum(_line(folder / "memory.stat", name) or 0 for name in files.cache)
            known.append(max(0, limit - used + cache))
    return min(known, default=None)


def require_free_memory(num_bytes: int) -> None:
    """Raises ConfigError unless so many bytes are free. Memory is populated behind a start or a wake: what does not fit
    would kill a worker that serves already. Workers of one host that wake at the same moment do not see each other."""
    free = free_memory()
    if free is not None and num_bytes > free:
        message = (
            f"engine.kv_memory_bytes: KV blocks, with those for the wire and the host tier, take {num_bytes} bytes,"
            f" and {free} bytes of memory are free on this machine, or below the limit of this container; lower it, or"
            " engine.num_blocks or engine.kv_host_tier_bytes"
        )
        raise ConfigError(message, field="engine.kv_memory_bytes")


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of this process's group and of all above it, up to the top of what is mounted."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, files = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
        parts = Path(path.lstrip("/")).parts
        # A container may see its own group as the top, and its path from the host's.
        yield top, files
        for depth in range(1, len(parts) + 1):
            yield top.joinpath(*parts[:depth]), files


def _number(path: Path) -> int | None:
    """None where there is no such file, or no limit (`max`)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _line(path: Path, name: str) -> int | None:
    """The number behind a name at the beginning of a line."""
    try:
        words = (line.split() for line in path.read_text().splitlines())
        return next((int(line[1]) for line in words if line[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None
