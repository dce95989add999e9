"""The inventory of this machine, asked of the NVIDIA driver through NVML (`nvidia-ml-py`, an extra)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from splitserve.errors import UnavailableError
from splitserve.extras import require
from splitserve.gpus.inventory import MAX_KIND, GpuInventory, is_slices

NVLINK = 2
"""NVML_P2P_CAPS_INDEX_NVLINK"""
STATUS_OK = 0
"""NVML_P2P_STATUS_OK"""
MIG_ENABLED = 1
"""NVML_DEVICE_MIG_ENABLE"""


@dataclass(frozen=True, slots=True)
class _Found:
    handle: Any
    index: int
    uuid: str
    kind: str
    slices: Mapping[str, str] | None
    """Kinds of its MIG slices by UUID; None if it is not in MIG mode."""


def driver_inventory(replicas_per_gpu: int = 1, library: Any = None) -> GpuInventory:
    """All GPUs of this machine by their numbers, with their kinds, and the pairs that share NVLink.

    A GPU in MIG mode is listed as its slices, by UUID. If there is such a GPU, all GPUs are named by UUID, because CUDA
    then numbers them in another way. `library` stands in for the module `pynvml`. Raises MissingExtraError
    without the package, UnavailableError (NO_NVML) without the driver.
    """
    nvml = library or load_library()
    with _opened(nvml):
        gpus = [_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        whole = [gpu for gpu in gpus if gpu.slices is None]
        numbered = len(whole) == len(gpus)
        names = {gpu.uuid: str(gpu.index) if numbered else gpu.uuid for gpu in whole}
        links = frozenset(
            frozenset((names[first.uuid], names[second.uuid]))
            for first, second in combinations(whole, 2)
            if _linked(nvml, first.handle, second.handle)
        )
    kinds = {
        name: kind
        for gpu in gpus
        for name, kind in (gpu.slices if gpu.slices is not None else {names[gpu.uuid]: gpu.kind}).items()
    }
    aliases = {gpu.uuid: str(gpu.index) for gpu in whole} if numbered else {}
    aliases |= {} if numbered else {str(gpu.index): gpu.uuid for gpu in whole}
    return GpuInventory(tuple(kinds), links, aliases, replicas_per_gpu, kinds)


def load_library() -> Any:
    """The module `pynvml`. Raises MissingExtraError without it."""
    require("the NVIDIA driver's list of GPUs", "nvml", "pynvml")
    import pynvml

    return pynvml


@contextmanager
def _opened(nvml: Any) -> Iterator[None]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        message = f"the NVIDIA driver does not answer here ({error}); list the GPUs instead, as 0,1"
        raise UnavailableError(message, reason="NO_NVML") from None
    try:
        yield
    except nvml.NVMLError as error:
        message = f"the NVIDIA driver does not say which GPUs there are: {error}"
        raise UnavailableError(message, reason="NO_NVML") from None
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> _Found:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    kind = _kind(nvml, handle)
    return _Found(handle, index, nvml.nvmlDeviceGetUUID(handle), kind, _slices(nvml, handle, kind))


def _kind(nvml: Any, handle: Any) -> str:
    try:
        name: str = nvml.nvmlDeviceGetName(handle)
        return name.strip()[:MAX_KIND]
    except nvml.NVMLError:  # without a kind the GPU still serves pools that name none
        return ""


def _slices(nvml: Any, handle: Any, whole: str) -> Mapping[str, str] | None:
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != MIG_ENABLED:
            return None
    except nvml.NVMLError:  # a GPU without MIG
        return None
    kinds = {}
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:  # fewer slices than it could have
            continue
        kind = _kind(nvml, part)
        # A driver that leaves the profile out must not make a slice look like a whole GPU.
        kinds[nvml.nvmlDeviceGetUUID(part)] = kind if is_slices(kind) else f"{kind or whole} MIG"
    return kinds


def _linked(nvml: Any, first: Any, second: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetP2PStatus(first, second, NVLINK) == STATUS_OK)
    except nvml.NVMLError:  # a GPU without NVLink
        return False
