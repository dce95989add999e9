"""RDMA ports and GPUs of this machine with their places on the PCI bus, read from the kernel's files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from splitserve.gpus.driver_files import PciGpu, pci_gpus

_ADDRESS = re.compile(r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_ROOT_COMPLEX = re.compile(r"^pci[0-9a-f]{4}:[0-9a-f]{2}$")


@dataclass(frozen=True, slots=True)
class PciPlace:
    """Where a device hangs."""

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
    """A GPU and where it hangs."""

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
        unopenable=tuple(name for name in devices if not _may_open(files.get(name))),
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
            state=_word(folder / str(number) / "state").rpartition(":")[2].strip(),
            link_layer=_word(folder / str(number) / "link_layer"),
            place=place,
        )
        for number in numbers
    ]


def _device_files(root: Path) -> dict[str, Path]:
    """/dev/infiniband/uverbsN by the name of its device."""
    folder = root / "sys/class/infiniband_verbs"
    entries = folder.iterdir() if folder.is_dir() else ()
    return {
        _word(entry / "ibdev"): root / "dev/infiniband" / entry.name
        for entry in entries
        if entry.name.startswith("uverbs")
    }


def _may_open(path: Path | None) -> bool:
    return path is not None and os.access(path, os.R_OK | os.W_OK)


def _place(link: Path) -> PciPlace:
    """Of a link to a PCI device's folder, or to a part of the device below it."""
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
    numa = _word(link / "numa_node")
    return PciPlace(
        path, int(numa) if numa.isdecimal() else None
    )  # the kernel says -1 where there are no nodes


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
