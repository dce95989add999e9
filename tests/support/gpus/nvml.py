"""An NVML library that tells of a machine in memory. Its functions have NVML's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import SimpleNamespace

from splitserve.gpus.nvml import MIG_ENABLED, NVLINK, STATUS_OK

NOT_SUPPORTED = 5


@dataclass
class FakeGpu:
    uuid: str
    slices: list[str | None] | None = None
    """UUIDs of its MIG slices, None for a place that is not in use; None if it is not in MIG mode."""
    knows_mig: bool = True
    name: str = "NVIDIA H100 80GB HBM3"
    profiles: dict[str, str] = field(default_factory=dict)
    """Of its slices by UUID; the driver says nothing of one that is not there."""


@dataclass
class FakeNvml:
    gpus: list[FakeGpu]
    linked: set[frozenset[int]] = field(default_factory=set)
    """Pairs of indexes with NVLink."""
    driver: bool = True
    opened: int = 0

    class NVMLError(Exception):
        """As pynvml's."""

    @classmethod
    def of(cls, count: int, groups: Sequence[Sequence[int]] = ()) -> FakeNvml:
        """So many GPUs; the members of a group are all linked."""
        linked = {frozenset(pair) for group in groups for pair in combinations(group, 2)}
        return cls([FakeGpu(f"GPU-{index:04x}") for index in range(count)], linked)

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.opened
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index >= len(self.gpus):
            raise self.NVMLError("Invalid Argument")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu | str:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
            if uuid in (gpu.slices or ()):
                return uuid
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu | str) -> SimpleNamespace:
        return SimpleNamespace(used=2**30, total=80 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu | str) -> SimpleNamespace:
        self._require_whole(handle)
        return SimpleNamespace(gpu=50, memory=20)

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu | str) -> int:
        self._require_whole(handle)
        return 400_000

    def nvmlDeviceGetTemperature(self, handle: FakeGpu | str, sensor: int) -> int:
        assert sensor == 0
        self._require_whole(handle)
        return 60

    def _require_whole(self, handle: FakeGpu | str) -> None:
        if isinstance(handle, str):
            raise self.NVMLError("Not Supported")

    def nvmlDeviceGetUUID(self, handle: FakeGpu | str) -> str:
        return handle if isinstance(handle, str) else handle.uuid

    def nvmlDeviceGetName(self, handle: FakeGpu | str) -> str:
        if isinstance(handle, FakeGpu):
            return handle.name
        whole = next(gpu for gpu in self.gpus if handle in (gpu.slices or ()))
        return f"{whole.name} MIG {whole.profiles[handle]}" if handle in whole.profiles else whole.name

    def nvmlDeviceGetMigMode(self, handle: FakeGpu | str) -> list[int]:
        self._require_whole(handle)
        assert isinstance(handle, FakeGpu)
        if not handle.knows_mig:
            raise self.NVMLError("Not Supported")
        return [0 if handle.slices is None else MIG_ENABLED, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return len(handle.slices or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> str:
        found = (handle.slices or [])[index]
        if found is None:
            raise self.NVMLError("Not Found")
        return found

    def nvmlDeviceGetP2PStatus(self, first: FakeGpu, second: FakeGpu, kind: int) -> int:
        assert kind == NVLINK
        pair = frozenset((self.gpus.index(first), self.gpus.index(second)))
        return STATUS_OK if pair in self.linked else NOT_SUPPORTED
