"""Facts of this machine that matter for transfers, read from the kernel."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC, _SYS, _DEV = Path("/proc"), Path("/sys"), Path("/dev")
TRANSPORT_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES")
MAX_HOST_ID_LENGTH = 64


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts of one machine. None means unknown unless stated otherwise."""

    shared_memory_bytes: int | None
    """Size of /dev/shm."""
    memlock_bytes: int | None
    """Memory that a process may lock; None means no limit."""
    in_container: bool
    rdma_devices: tuple[str, ...]
    gpus: int
    """Number of NVIDIA devices visible to this process."""
    ptrace_scope: int | None
    """kernel.yama.ptrace_scope; above 0, process_vm_writev between unrelated processes is restricted."""
    variables: Mapping[str, str]
    """UCX_TLS and UCX_NET_DEVICES, if set."""


def read_host_facts() -> HostFacts:
    """The facts of this machine, as this process sees it."""
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)  # the soft limit
    return HostFacts(
        shared_memory_bytes=_shared_memory_bytes(),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        in_container=(Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()),
        rdma_devices=rdma_devices(),
        gpus=sum(path.name[6:].isdecimal() for path in _DEV.glob("nvidia[0-9]*")),
        ptrace_scope=number_in(_PROC / "sys/kernel/yama/ptrace_scope"),
        variables={name: os.environ[name] for name in TRANSPORT_VARIABLES if os.environ.get(name)},
    )


def rdma_devices() -> tuple[str, ...]:
    """Names of the RDMA devices."""
    folder = _SYS / "class/infiniband"
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


def host_id() -> str:
    """The kernel's boot id: equal for all processes of a machine, also in containers. Empty if unknown."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()[:MAX_HOST_ID_LENGTH]
    except OSError:
        return ""


def network_bytes_sent() -> int | None:
    """Bytes sent over all network interfaces of this process's network namespace, loopback included.

    None if unknown. Excludes shared memory, process_vm_writev, CUDA IPC and RDMA.
    """
    try:
        lines = (_PROC / "net/dev").read_text().splitlines()[2:]
    except OSError:
        return None
    # Columns after the interface's name: eight of received traffic, then those of sent traffic, bytes first.
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def _shared_memory_bytes() -> int | None:
    try:
        return shutil.disk_usage(_DEV / "shm").total
    except OSError:
        return None


def number_in(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or if it has none, as where a limit is `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
