"""GPUs and RDMA ports of this machine with their places on the PCI bus, read from the kernel's and the driver's files,
and which ports are the nearest to a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class PciGpu:
    """A GPU as this process, or its container, sees it."""

    index: int
    """The GPU's number with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    uuid: str
    """Empty where the driver does not say."""
    address: str
    """Domain, bus, device and function: "0000:1b:00.0"."""


def pci_gpus(root: Path = _ROOT) -> tuple[PciGpu, ...]:
    """The GPUs in /proc/driver/nvidia/gpus, in the order of their addresses; none without a driver."""
    folder = root / "proc/driver/nvidia/gpus"
    try:
        addresses = sorted(path.name.lower() for path in folder.iterdir())
    except OSError:
        return ()
    return tuple(
        PciGpu(index, _uuid(folder / address / "information"), address)
        for index, address in enumerate(addresses)
    )


def _uuid(path: Path) -> str:
    lines = _text(path).splitlines()
    uuid = next((line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID")), "")
    return uuid if uuid.startswith("GPU-") else ""


_ADDRESS = re.compile(r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_ROOT_COMPLEX = re.compile(r"^pci[0-9a-f]{4}:[0-9a-f]{2}$")


@dataclass(frozen=True, slots=True)
class PciPlace:
    """Where a device is attached to the PCI bus."""

    path: tuple[str, ...] = ()
    """Root complex, bridges and the device itself, as "pci0000:15", "0000:15:01.0". Empty if not known."""
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device."""

    device: str
    number: int
    state: str
    """The kernel's word: ACTIVE, DOWN, INIT, …"""
    link_layer: str
    """InfiniBand or Ethernet."""
    place: PciPlace

    @property
    def name(self) -> str:
        """As UCX_NET_DEVICES names it: "mlx5_0:1"."""
        return f"{self.device}:{self.number}"

    @property
    def active(self) -> bool:
        """Whether it carries traffic."""
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class PlacedGpu:
    """A GPU and where it is attached."""

    gpu: PciGpu
    place: PciPlace


@dataclass(frozen=True, slots=True)
class RdmaFacts:
    """What this process sees of RDMA."""

    ports: tuple[RdmaPort, ...] = ()
    unopenable: tuple[str, ...] = ()
    """Devices whose file under /dev/infiniband is missing here, or may not be read and written."""
    gpus: tuple[PlacedGpu, ...] = ()
    peer_memory: bool = False
    """The module nvidia_peermem is loaded: network cards read and write the memory of GPUs."""


def read_rdma_facts(root: Path = Path("/")) -> RdmaFacts:
    """The facts under /sys, /proc and /dev of `root`. What is missing there is left out; it never raises."""
    folder = root / "sys/class/infiniband"
    devices = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    files = _device_files(root)
    gpus = tuple(PlacedGpu(gpu, _place(root / "sys/bus/pci/devices" / gpu.address)) for gpu in pci_gpus(root))
    return RdmaFacts(
        ports=tuple(port for device in devices for port in _ports(folder / device)),
        unopenable=tuple(
            name
            for name in devices
            if (path := files.get(name)) is None or not os.access(path, os.R_OK | os.W_OK)
        ),
        gpus=gpus,
        peer_memory=(root / "sys/module/nvidia_peermem").is_dir(),
    )


def _ports(device: Path) -> list[RdmaPort]:
    folder, place = device / "ports", _place(device / "device")
    numbers = (
        sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
        if folder.is_dir()
        else []
    )
    return [
        RdmaPort(
            device=device.name,
            number=number,
            state=_text(folder / str(number) / "state").rpartition(":")[2].strip(),
            link_layer=_text(folder / str(number) / "link_layer"),
            place=place,
        )
        for number in numbers
    ]


def _device_files(root: Path) -> dict[str, Path]:
    """/dev/infiniband/uverbsN by the name of its device."""
    folder = root / "sys/class/infiniband_verbs"
    entries = folder.iterdir() if folder.is_dir() else ()
    return {
        _text(entry / "ibdev"): root / "dev/infiniband" / entry.name
        for entry in entries
        if entry.name.startswith("uverbs")
    }


def _place(link: Path) -> PciPlace:
    """The place of a device: `link` leads to its folder, or to a folder of a part of the device below it."""
    try:
        parts = link.resolve(strict=True).parts
    except OSError:
        return PciPlace()
    begin = next((place for place, part in enumerate(parts) if _ROOT_COMPLEX.match(part)), len(parts))
    path = parts[begin : begin + 1]
    for part in parts[begin + 1 :]:
        if not _ADDRESS.match(part):
            break
        path += (part,)
    numa = _text(link / "numa_node")
    # The kernel says -1 on machines without NUMA nodes.
    return PciPlace(path, int(numa) if numa.isdecimal() else None)


def _text(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


class Nearness(IntEnum):
    """What lies between two PCI devices; lower is nearer. In brackets the terms of `nvidia-smi topo -m`."""

    SWITCH = 0
    """PCIe switches only (PIX, PXB)."""
    HOST_BRIDGE = 1
    """A host bridge of the processor (PHB)."""
    NUMA_NODE = 2
    """Host bridges of one NUMA node (NODE)."""
    SYSTEM = 3
    """The link between NUMA nodes (SYS), or something unknown."""


IN_WORDS = {
    Nearness.SWITCH: "one PCIe switch",
    Nearness.HOST_BRIDGE: "one host bridge",
    Nearness.NUMA_NODE: "one NUMA node",
    Nearness.SYSTEM: "across NUMA nodes",
}


def nearness(first: PciPlace, second: PciPlace) -> Nearness:
    """What lies between two devices."""
    shared = _shared_steps(first, second)
    if shared > 1:
        return Nearness.SWITCH
    if shared == 1:
        return Nearness.HOST_BRIDGE
    if first.numa_node is not None and first.numa_node == second.numa_node:
        return Nearness.NUMA_NODE
    return Nearness.SYSTEM


def nearest_ports(gpu: PlacedGpu, ports: Sequence[RdmaPort]) -> list[RdmaPort]:
    """The active ports nearest to the GPU; of equally near ones those with the longest common path on the bus."""
    active = [port for port in ports if port.active]

    def distance(port: RdmaPort) -> tuple[int, int]:
        return nearness(gpu.place, port.place), -_shared_steps(gpu.place, port.place)

    least = min(map(distance, active), default=None)
    return [port for port in active if distance(port) == least]


def nearest_nics(gpus: Sequence[PlacedGpu], ports: Sequence[RdmaPort]) -> list[str]:
    """The nearest active ports of these GPUs, each once, as UCX_NET_DEVICES names them."""
    return list(dict.fromkeys(port.name for gpu in gpus for port in nearest_ports(gpu, ports)))


def _shared_steps(first: PciPlace, second: PciPlace) -> int:
    steps = zip(first.path, second.path, strict=False)
    return len(list(takewhile(lambda step: step[0] == step[1], steps)))
