"""Placement of a local cluster's workers: cores and GPUs from an inventory."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from autoscaler.actuators.actuator import ONE_GPU, ReplicaShape
from splitserve.config.gpu_list import gpu_names
from splitserve.errors import InvalidArgumentError, UnavailableError
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.nvml import driver_inventory
from splitserve.gpus.placement import GpuUse, choose_gpus
from splitserve.gpus.worker_gpus import VISIBLE_VARIABLE
from splitserve.host_facts import read_host_facts
from splitserve.logs import log_event

if TYPE_CHECKING:
    from splitserve.config.cluster import ClusterConfig

PROBE_S = 60.0
_PROBE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One worker's cores and its number of compute threads. A worker without cores may run on all of them."""

    cpus: tuple[int, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's share of the machine."""

    share: CoreShare
    gpus: tuple[str, ...] | None = None
    """The worker's GPUs. None: it uses the device in its settings; empty: it uses the CPU."""


@dataclass(slots=True)
class Inventory:
    """Core shares and GPUs with their current users. All shares are equal, however many workers run."""

    shares: Sequence[CoreShare]
    gpus: GpuInventory = field(default_factory=GpuInventory)
    _taken: dict[str, tuple[int, str, Place]] = field(default_factory=dict)
    """By worker: the index of its core share, its pool and its place."""

    def take(self, name: str, pool: str, shape: ReplicaShape = ONE_GPU) -> Place:
        """Assigns the worker the share with the fewest users, the first among equals, and GPUs.

        Raises as `choose_gpus`. On a machine without GPUs the settings decide on the device.
        """
        users = Counter(number for number, _, _ in self._taken.values())
        number = min(range(len(self.shares)), key=users.__getitem__)
        uses = [GpuUse(user_pool, place.gpus or ()) for _, user_pool, place in self._taken.values()]
        chosen = choose_gpus(self.gpus, uses, pool, shape.gpus, shape.gpu) if self.gpus.gpus else None
        place = Place(self.shares[number], chosen)
        self._taken[name] = number, pool, place
        return place

    def release(self, name: str) -> None:
        """Releases the place of a worker that ended."""
        self._taken.pop(name, None)

    def release_except(self, names: Collection[str]) -> None:
        """Releases the places of all workers but those of `names`."""
        for name in self._taken.keys() - set(names):
            self.release(name)

    def place_of(self, name: str) -> Place | None:
        """A worker's place; None if it has none."""
        taken = self._taken.get(name)
        return taken[2] if taken else None


def make_inventory(
    cores: Sequence[int], workers: int, *, pin_cores: bool, gpus: GpuInventory | None = None
) -> Inventory:
    """The inventory of a machine with these cores and GPUs, for at most `workers` workers at once."""
    shares = layout_cores(cores, workers) if pin_cores else unpinned_cores(cores, workers)
    return Inventory(shares, gpus or GpuInventory())


def machine_gpus(
    kind: str, device: str, replicas_per_gpu: int = 1, environment: Mapping[str, str] = os.environ
) -> GpuInventory:
    """The GPUs to spread workers over: all that PyTorch can use, for device `auto` or `cuda`; else none.

    NVML says which GPUs share NVLink; where NVML does not answer, all GPUs count as equally near. A child process asks
    PyTorch, and only if the kernel reports a GPU: PyTorch is slow to import, and the supervisor does not need it.
    """
    if kind == "simulated" or device not in ("auto", "cuda") or not read_host_facts().gpus:
        return GpuInventory(replicas_per_gpu=replicas_per_gpu)
    usable = _usable_gpus()
    if not usable:  # the workers find and report the problem
        return GpuInventory(replicas_per_gpu=replicas_per_gpu)
    limited = environment.get(VISIBLE_VARIABLE)
    try:
        inventory = driver_inventory(replicas_per_gpu)
    except UnavailableError as error:
        log_event("gpus.links_unknown", level=logging.WARNING, why=error.message)
        names = [str(number) for number in range(usable)] if limited is None else gpu_names(limited)
        return GpuInventory.of_groups([names], replicas_per_gpu)
    return inventory if limited is None else inventory.restricted_to(gpu_names(limited))


def with_default_engine(config: ClusterConfig) -> ClusterConfig:
    """The settings with engine vllm where they name no engine, this machine has GPUs and vLLM is installed."""
    engine = config.engine
    if "kind" in engine.model_fields_set or engine.device == "cpu":
        return config
    if not read_host_facts().gpus or find_spec("vllm") is None:
        return config
    return config.model_copy(update={"engine": engine.model_copy(update={"kind": "vllm"})})


def _usable_gpus() -> int:
    """How many GPUs PyTorch can use here."""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S, check=True
        )
        return int(answer.stdout)
    except (subprocess.SubprocessError, ValueError):
        return 0


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
        return [CoreShare((ordered[number % len(ordered)],), 1) for number in range(workers)]
    if len(ordered) <= 2 * workers:
        cores_each, more = divmod(len(ordered), workers)
    else:
        cores_each, more = (len(ordered) - 1) // workers, 0
    shares, start = [], 0
    for number in range(workers):
        end = start + cores_each + (1 if number < more else 0)
        shares.append(CoreShare(tuple(ordered[start:end]), end - start))
        start = end
    return shares


def unpinned_cores(cores: Sequence[int], workers: int) -> list[CoreShare]:
    """Lets every worker run on all cores, with as many threads as its fair share of them."""
    return [CoreShare((), max(1, len(cores) // workers))] * workers


def available_cores() -> list[int]:
    """The cores that this process and its children may run on."""
    return sorted(os.sched_getaffinity(0))
