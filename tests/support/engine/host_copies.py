"""vLLM's `SimpleCPUOffloadConnector` on CPU: vLLM's own scheduling and regions, copies by torch instead of CUDA.

A copy ends `LATE_POLLS` polls after it was asked for, as on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.simple_kv_offload import worker as vllms

LATE_POLLS = 20


class Copy:
    """One copy, made when it is first found to have ended."""

    def __init__(self, sources: Any, targets: Any, source_blocks: Any, target_blocks: Any) -> None:
        self._pools = [(sources[name], targets[name]) for name in sources]
        self._blocks = source_blocks, target_blocks
        self._polls = 0

    def query(self) -> bool:
        self._polls += 1
        if self._polls == LATE_POLLS:
            self.synchronize()
        return self._polls >= LATE_POLLS

    def synchronize(self) -> None:
        source_blocks, target_blocks = self._blocks
        for source, target in self._pools:
            target[target_blocks] = source[source_blocks]
        self._polls = LATE_POLLS


class Copies:
    """In place of vLLM's `DmaCopyBackend`."""

    def init(self, device: Any, host: Any, *streams: Any) -> None:
        self._device, self._host = device, host

    def launch_copy(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Copy]],
        wait_event: object = None,
    ) -> None:
        pools = (self._device, self._host) if is_store else (self._host, self._device)
        events_list.append((event_idx, Copy(*pools, list(sources), list(targets))))


class CopyingWorker(vllms.SimpleCPUOffloadWorker):
    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        stream, backend = torch.cuda.Stream, vllms.DmaCopyBackend
        torch.cuda.Stream = NoStream
        vllms.DmaCopyBackend = Copies
        try:
            super().register_kv_caches(kv_caches)
        finally:
            torch.cuda.Stream, vllms.DmaCopyBackend = stream, backend

    @override
    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if metadata is not None and metadata.store_gpu_blocks:
            self._backend.launch_copy(
                metadata.store_gpu_blocks,
                metadata.store_cpu_blocks,
                True,
                metadata.store_event,
                self._store_events,
            )


class NoStream(SimpleNamespace):
    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class HostCopies(SimpleCPUOffloadConnector):
    """`kv_connector_module_path` names this module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.worker_handler is not None:
            handler = self.worker_handler
            self.worker_handler = CopyingWorker(
                handler.vllm_config, handler.kv_cache_config, handler.cpu_capacity_bytes
            )
