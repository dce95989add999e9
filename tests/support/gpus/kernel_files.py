"""Trees of /sys, /proc and /dev of a machine with GPUs and RDMA ports, as the kernel lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class FakeNic:
    name: str
    pci: str
    """Root complex, bridges and device: "pci0000:15/0000:15:01.0/0000:17:00.0"."""
    numa: int = 0
    states: Sequence[str] = ("4: ACTIVE",)
    link_layer: str = "InfiniBand"
    has_file: bool = True


@dataclass
class FakeMachine:
    gpus: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By UUID: PCI path and NUMA node."""
    nics: list[FakeNic] = field(default_factory=list)
    peer_memory: bool = True

    def write(self, root: Path) -> Path:
        """The tree under `root`; returns it."""
        for uuid, (pci, numa) in self.gpus.items():
            device = _device(root, pci, numa)
            _link(root / "sys/bus/pci/devices" / device.name, device)
            lines = f"Model: \t\t A device\nGPU UUID:   \t {uuid}\nBus Location: \t {device.name}\n"
            _write(root / "proc/driver/nvidia/gpus" / device.name / "information", lines)
        for number, nic in enumerate(self.nics):
            device = _device(root, nic.pci, nic.numa)
            own = device / "infiniband" / nic.name
            for port, state in enumerate(nic.states, 1):
                _write(own / f"ports/{port}/state", f"{state}\n")
                _write(own / f"ports/{port}/link_layer", f"{nic.link_layer}\n")
            _link(own / "device", device)
            _link(root / "sys/class/infiniband" / nic.name, own)
            _write(root / f"sys/class/infiniband_verbs/uverbs{number}/ibdev", f"{nic.name}\n")
            if nic.has_file:
                _write(root / f"dev/infiniband/uverbs{number}", "")
        if self.peer_memory:
            (root / "sys/module/nvidia_peermem").mkdir(parents=True)
        return root


def two_sockets() -> FakeMachine:
    """Two GPUs and two network cards, a pair of them on a PCIe switch of each socket."""
    return FakeMachine(
        gpus={
            "GPU-a": ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:18:00.0", 0),
            "GPU-b": ("pci0000:95/0000:95:01.0/0000:96:00.0/0000:98:00.0", 1),
        },
        nics=[
            FakeNic("mlx5_0", "pci0000:15/0000:15:01.0/0000:16:01.0/0000:19:00.0", 0),
            FakeNic("mlx5_1", "pci0000:95/0000:95:01.0/0000:96:01.0/0000:99:00.0", 1),
        ],
    )


def _device(root: Path, pci: str, numa: int) -> Path:
    device = root / "sys/devices" / pci
    _write(device / "numa_node", f"{numa}\n")
    return device


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _link(path: Path, to: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to)
