"""The GPUs that the NVIDIA driver shows in /proc, with their places on the PCI bus. No library is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class PciGpu:
    """A GPU as this process, or its container, sees it."""

    index: int
    """Its number with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
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
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID")), "")
    return found if found.startswith("GPU-") else ""
