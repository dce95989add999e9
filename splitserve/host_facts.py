"""What this machine offers to transfers: read from the kernel, each fact on its own."""

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
    """None means: not known here."""

    shared_memory_bytes: int | None
    """Size of /dev/shm."""
    memlock_bytes: int | None
    """Memory that a process may lock; None also when there is no limit."""
    in_container: bool
    rdma_devices: tuple[str, ...]
    gpus: int
    """NVIDIA devices that this process can see."""
    ptrace_scope: int | None
    """Yama's setting; above 0 a process may not read or write a stranger's memory."""
    variables: Mapping[str, str]
    """UCX_TLS and UCX_NET_DEVICES, where they are set."""


def read_host_facts() -> HostFacts:
    """The facts of this machine, as this process sees it."""
    return HostFacts(
        shared_memory_bytes=_shared_memory_bytes(),
        memlock_bytes=_memlock_bytes(),
        in_container=(Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()),
        rdma_devices=rdma_devices(),
        gpus=sum(path.name[6:].isdecimal() for path in _DEV.glob("nvidia[0-9]*")),
        ptrace_scope=_number(_PROC / "sys/kernel/yama/ptrace_scope"),
        variables={name: os.environ[name] for name in TRANSPORT_VARIABLES if os.environ.get(name)},
    )


def rdma_devices() -> tuple[str, ...]:
    """Names of the RDMA devices that the kernel knows."""
    folder = _SYS / "class/infiniband"
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


def host_id() -> str:
    """The kernel's boot id: equal for all processes of one machine, in containers too. Empty if unknown."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()[:MAX_HOST_ID_LENGTH]
    except OSError:
        return ""


def network_bytes_sent() -> int | None:
    """Bytes sent over all network interfaces of this process's network namespace, loopback included.

    None where the kernel does not tell. Bytes that go through shared memory, process_vm_writev, CUDA IPC or
    RDMA are not among them.
    """
    try:
        lines = (_PROC / "net/dev").read_text().splitlines()[2:]
    except OSError:
        return None
    # After the interface's name: eight columns of what was received, then what was sent, bytes first.
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def _shared_memory_bytes() -> int | None:
    try:
        return shutil.disk_usage(_DEV / "shm").total
    except OSError:
        return None


def _memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
