"""Which of UCX's lanes its copies in this process may use, before they are loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from splitserve.logs import log_event

SHARED_MEMORY = Path("/dev/shm")
NEEDED_BYTES = 64 * 2**20
"""Free bytes in SHARED_MEMORY with which UCX may use its lane `posix`. An agent takes 4 MiB there and leaves 16 MiB
free; where its first 36 KiB bring it below that, UCX 1.21 and 1.23 end the process (SIGSEGV). Far above these 20 MiB,
because the workers of a host look at the same time."""
CUDA_IPC, POSIX = "cuda_ipc", "posix"
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "cuda": ("cuda_copy", "gdr_copy", CUDA_IPC),
    **dict.fromkeys(("sm", "shm"), ("sysv", POSIX, "cma", "xpmem", "knem")),
    "mm": ("sysv", POSIX, "xpmem"),
}
"""Names in UCX_TLS that stand for several lanes, among them one that may have to be left out."""


def lanes_without(lanes: str | None, left_out: Collection[str]) -> str:
    """The value of UCX_TLS with which UCX never uses the lanes in `left_out`, at least one. `lanes`: the value that is
    set, None if there is none."""
    given = (lanes or "all").strip()
    none_of_them = f"^{','.join(left_out)}"
    if given.startswith("^"):
        excluded = {lane for name in given[1:].split(",") for lane in (name, *_ALIASES.get(name, ()))}
        return ",".join([given, *(lane for lane in left_out if lane not in excluded)])
    names = dict.fromkeys(name.strip() for name in given.split(","))
    if "all" in names:
        return none_of_them
    wanted: dict[str, None] = {}
    for name in names:
        covered = _ALIASES.get(name, ())
        wanted |= dict.fromkeys(covered if set(covered) & set(left_out) else (name,))
    return ",".join(lane for lane in wanted if lane not in left_out) or none_of_them


def lanes_without_room(folder: Path = SHARED_MEMORY) -> list[str]:
    """The lanes that the shared memory of this machine or container has no room for; logs what there is, and what is
    needed."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return []  # UCX does without it
    free = status.f_bavail * status.f_frsize
    if free >= NEEDED_BYTES:
        return []
    what = f"{folder} has {free / 2**20:.0f} MiB free, and UCX needs {NEEDED_BYTES / 2**20:.0f} MiB there"
    error = f"{what}: its lane {POSIX} is left out (Docker: --shm-size, Kubernetes: an emptyDir in memory)"
    log_event("transport.shared_memory_small", level=logging.WARNING, error=error)
    return [POSIX]
