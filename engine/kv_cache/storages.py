"""Memory of torch's storages that is given back to a device, and taken again, while tensors keep their names for it.

A storage can be resized to nothing and back. Tensors that view it stay valid, but its address may be another one then:
whoever has kept an address, as a CUDA graph does, must have forgotten it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from engine.kv_cache.free_memory import free_memory
from splitserve.logs import log_event

ALIGNED = 512
"""In a host copy each storage begins at a multiple of so many bytes."""


def give_back(storages: Iterable[torch.UntypedStorage]) -> None:
    """Gives the storages' memory back; their content is lost."""
    for storage in storages:
        storage.resize_(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors, each one once; those without memory are left out."""
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


class HostCopy:
    """What storages hold, kept in main memory while their own memory is given back."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copies and gives back. `storages` are of one device."""
        sizes = [-(-storage.nbytes() // ALIGNED) * ALIGNED for storage in storages]
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8)
        self._pinned = _pin(self._memory) if storages and storages[0].device.type == "cuda" else False
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        begin = 0
        for storage, size in zip(storages, sizes, strict=True):
            part = self._memory[begin : begin + storage.nbytes()]
            part.copy_(_bytes(storage), non_blocking=self._pinned)
            self._kept.append((storage, part))
            begin += size
        _wait(storages)
        give_back(storages)

    def bring_back(self) -> None:
        """Gives the storages memory and their content again; of no use after that. Raises torch.OutOfMemoryError where
        the device has too little."""
        for storage, part in self._kept:
            storage.resize_(part.numel())
            _bytes(storage).copy_(part, non_blocking=self._pinned)
        _wait([storage for storage, _ in self._kept])
        self.close()

    def close(self) -> None:
        """Gives the copy up."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._kept, self._pinned = [], False


def host_copy(tensors: Iterable[torch.Tensor]) -> HostCopy | None:
    """Moves the tensors' memory to the host, if that has room for it; else they stay, which is logged."""
    storages = storages_of(tensors)
    wanted, free = sum(storage.nbytes() for storage in storages), free_memory()
    if free is not None and wanted > free:
        log_event("worker.weights_stay", bytes=wanted, free_bytes=free)
        return None
    return HostCopy(storages)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pin(memory: torch.Tensor) -> bool:
    """Whether the memory is pinned now, so that a device copies it several times as fast: exactly these bytes, where
    torch's own pinned memory is rounded to a power of two and never given back."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
        return True
    # The error stays the device's last one, and the next launch would be taken for failed.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def _wait(storages: Sequence[torch.UntypedStorage]) -> None:
    if storages and storages[0].device.type == "cuda":
        torch.cuda.synchronize(storages[0].device)
