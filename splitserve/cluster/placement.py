"""Placement of a local cluster's workers: cores and GPUs from an inventory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from splitserve.errors import InvalidArgumentError, ResourceExhaustedError
from splitserve.host_facts import read_host_facts

PROBE_S = 60.0
_PROBE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One worker's cores and its number of compute threads. Without cores it may run on all."""

    cpus: tuple[int, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's share of the machine. Without a device it uses the one in its settings."""

    share: CoreShare
    device: str | None = None


@dataclass(slots=True)
class Inventory:
    """Core shares and GPUs with their current users. All shares are equal, however many workers run."""

    shares: Sequence[CoreShare]
    devices: Sequence[str] = ()
    _taken: dict[str, tuple[int, Place]] = field(default_factory=dict)

    def take(self, name: str, *, own_device: bool = False) -> Place:
        """Assigns the worker the share and the GPU with the fewest users, the first among equals.

        With `own_device` the GPU must be free; else raises ResourceExhaustedError (NO_GPU).
        """
        users = Counter(number for number, _ in self._taken.values())
        number = min(range(len(self.shares)), key=lambda n: users[n])
        place = Place(self.shares[number], self._device(own_device))
        self._taken[name] = number, place
        return place

    def release(self, name: str) -> None:
        """Releases the place of a worker that ended."""
        self._taken.pop(name, None)

    def release_except(self, names: Collection[str]) -> None:
        """Releases the places of all other workers."""
        for name in self._taken.keys() - set(names):
            self.release(name)

    def place_of(self, name: str) -> Place | None:
        """A worker's place; None if it has none."""
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
    """The inventory of a machine with these cores and GPUs, for at most `workers` workers at once."""
    shares = layout_cores(cores, workers) if pin_cores else unpinned_cores(cores, workers)
    return Inventory(shares, devices)


def cuda_devices(kind: str, device: str) -> tuple[str, ...]:
    """The GPUs to spread workers over: all that PyTorch can use for device `auto` or `cuda`; else none.

    Queried in a child process, and only if the kernel reports a GPU: PyTorch is slow to import, and the supervisor
    does not need it.
    """
    if kind == "simulated" or device not in ("auto", "cuda") or not read_host_facts().gpus:
        return ()
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S, check=True
        )
        return tuple(f"cuda:{number}" for number in range(int(answer.stdout)))
    except (subprocess.SubprocessError, ValueError):
        return ()  # the workers find and report the problem


def layout_cores(cores: Sequence[int], workers: int) -> list[CoreShare]:
    """Gives each of `workers` its own cores, so that compute threads of two workers do not compete for one.

    With at most two cores per worker, all cores are distributed, and the coordinator, which needs little, shares
    them; with fewer cores than workers, each worker gets one core, in turn. With more cores, all workers get the
    same number and at least one core stays free for the coordinator.
    """
    if not cores:
        raise InvalidArgumentError("cores must not be empty", field="cores")
    if workers < 1:
        raise InvalidArgumentError(f"workers must be at least 1, not {workers}", field="workers")
    ordered = sorted(cores)
    if workers >= len(ordered):
        return [CoreShare((ordered[n % len(ordered)],), 1) for n in range(workers)]
    if len(ordered) <= 2 * workers:
        each, more = divmod(len(ordered), workers)
    else:
        each, more = (len(ordered) - 1) // workers, 0
    shares, start = [], 0
    for number in range(workers):
        end = start + each + (1 if number < more else 0)
        shares.append(CoreShare(tuple(ordered[start:end]), end - start))
        start = end
    return shares


def unpinned_cores(cores: Sequence[int], workers: int) -> list[CoreShare]:
    """Lets every worker run on all cores, with as many threads as its fair share of them."""
    return [CoreShare((), max(1, len(cores) // workers))] * workers


def available_cores() -> list[int]:
    """The cores that this process and its children may run on."""
    return sorted(os.sched_getaffinity(0))
