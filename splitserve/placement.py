"""Where each worker of a local cluster runs: its cores and its GPU, from an inventory of both."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from splitserve.core_layout import CoreShare, layout_cores, unpinned_cores
from splitserve.errors import ResourceExhaustedError
from splitserve.host_facts import read_host_facts

PROBE_S = 60.0
_PROBE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's part of the machine. Without a device it uses the one that its settings name."""

    share: CoreShare
    device: str | None = None


@dataclass(slots=True)
class Inventory:
    """Core shares and GPUs, and who has which. Every worker has an equal share, whatever their number is now."""

    shares: Sequence[CoreShare]
    devices: Sequence[str] = ()
    _taken: dict[str, tuple[int, Place]] = field(default_factory=dict)

    def take(self, name: str, *, own_device: bool = False) -> Place:
        """A place for this worker: the share and the GPU that fewest have, in their order.

        With `own_device` the GPU must be free. Raises ResourceExhaustedError (NO_GPU).
        """
        users = Counter(number for number, _ in self._taken.values())
        number = min(range(len(self.shares)), key=lambda n: users[n])
        place = Place(self.shares[number], self._device(own_device))
        self._taken[name] = number, place
        return place

    def release(self, name: str) -> None:
        """Gives the place of a worker that ended back."""
        self._taken.pop(name, None)

    def keep(self, names: Collection[str]) -> None:
        """Gives the places of all workers but these back."""
        for name in self._taken.keys() - set(names):
            self.release(name)

    def place_of(self, name: str) -> Place | None:
        """The place of a worker; None when it has none."""
        taken = self._taken.get(name)
        return taken[1] if taken else None

    def _device(self, own: bool) -> str | None:
        if not self.devices:
            return None
        users = Counter(place.device for _, place in self._taken.values())
        device = min(self.devices, key=lambda candidate: users[candidate])
        if own and users[device]:
            message = f"none of the {len(self.devices)} GPUs is free"
            raise ResourceExhaustedError(message, reason="NO_GPU")
        return device


def make_inventory(
    cores: Sequence[int], workers: int, *, pin_cores: bool, devices: Sequence[str] = ()
) -> Inventory:
    """The inventory of a machine with these cores and GPUs, for at most so many workers at once."""
    shares = layout_cores(cores, workers) if pin_cores else unpinned_cores(cores, workers)
    return Inventory(shares, devices)


def cuda_devices(kind: str, device: str) -> tuple[str, ...]:
    """The GPUs to spread workers over: all that PyTorch can use, for device `auto` or `cuda`; else none.

    Asked in a process of its own, and only where the kernel knows a GPU: PyTorch is slow to import and what it
    holds is not for the supervisor.
    """
    if kind == "simulated" or device not in ("auto", "cuda") or not read_host_facts().gpus:
        return ()
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S, check=True
        )
        return tuple(f"cuda:{number}" for number in range(int(answer.stdout)))
    except (subprocess.SubprocessError, ValueError):
        return ()  # Workers find out themselves, and say what is wrong.
