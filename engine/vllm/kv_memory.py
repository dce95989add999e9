"""vLLM's KV cache as a memory region: one row of blocks for each layer, of a layout that only vLLM's kernels read."""

from __future__ import annotations

import copy
import ctypes
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from engine.kv_cache.memory import DTYPES
from engine.model.loaded_model import model_fingerprint
from kv_transfer.lanes import probe_blocks
from kv_transfer.layout import HEADS_OUTERMOST, KvLayout
from kv_transfer.transports.regions import KvMemoryRegion
from splitserve.errors import UnsupportedModelError

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CPU_BACKEND = "CPU_ATTN"


class FileTensors(Mapping[str, torch.Tensor]):
    """The tensors of a folder's safetensors files, read one at a time. Raises UnsupportedModelError without any."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)
        if not self._files:
            raise UnsupportedModelError(f"model {folder}: with engine vllm it needs safetensors files")

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Any:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def kv_region(
    kv_caches: Mapping[str, torch.Tensor], fingerprint: str, order: str, version: str
) -> KvMemoryRegion:
    """The region of vLLM's KV cache in this process; its last blocks are for lane probes.

    `kv_caches`: a view `[blocks, kv_heads, block_size, 2 * head_dim]` of each layer, contiguous, at equal distances in
    memory. `order` names how the kernels read it, `version` is vLLM's, `fingerprint` the model's. Raises
    UnsupportedModelError for KV of another shape.
    """
    tensors = list(kv_caches.values())
    first = tensors[0]
    addresses = [tensor.data_ptr() for tensor in tensors]
    stride = addresses[1] - addresses[0] if len(addresses) > 1 else first.nbytes
    even = all(address == addresses[0] + row * stride for row, address in enumerate(addresses))
    alike = all(tensor.shape == first.shape and tensor.is_contiguous() for tensor in tensors)
    if first.dim() != 4 or not (even and alike) or stride < first.nbytes or first.dtype not in DTYPE_NAMES:
        raise UnsupportedModelError("engine vllm: the model's KV is not one equal row of blocks a layer")
    blocks, heads, tokens, width = first.shape
    layout = KvLayout(
        model_fingerprint=fingerprint,
        dtype=DTYPE_NAMES[first.dtype],
        block_size_tokens=tokens,
        num_layers=len(tensors),
        num_kv_heads=heads,
        head_dim=width // 2,
        axis_order=order,
        engine_version=version,
    )
    on_cpu = first.device.type == "cpu"
    return KvMemoryRegion(
        base_address=addresses[0],
        num_blocks=blocks,
        layout=layout,
        memory_kind="DRAM" if on_cpu else "VRAM",
        device_index=0 if on_cpu else (first.device.index or 0),
        probe_blocks=probe_blocks(layout.block_bytes),
        layer_stride=stride,
    )


def fingerprint_of(folder: Path, settings: Mapping[str, Any], tied: Mapping[str, str] | None = None) -> str:
    """The fingerprint of the model in `folder`, whose configuration is `settings`; `tied` as in `tied_tensors`."""
    return model_fingerprint(settings, FileTensors(folder), tied)


def tied_tensors(config: Any) -> Mapping[str, str]:
    """The tensors that `transformers` ties to others in a model of this configuration, and those others.

    None for a model that `transformers` does not know as a causal one.
    """
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except (ValueError, ImportError, TypeError, RuntimeError, AttributeError, KeyError):
        return {}
    names: dict[str, str] = module.all_tied_weights_keys
    return names


def block_order(vllm_config: Any, kv_caches: Mapping[str, torch.Tensor]) -> str:
    """The `axis_order` of vLLM's KV. Call it in the process that holds the KV, `kv_caches`."""
    layers = vllm_config.compilation_config.static_forward_context
    layer = next(iter(layers.values()))
    backend = layer.get_attn_backend().get_name()
    instructions = layer.isa if backend == CPU_BACKEND else ""
    return order_of(backend, instructions)


def order_of(backend: str, instructions: str) -> str:
    """How the kernels of an attention backend read a block: opaque, so the backend's name, and on cpu the instructions
    that a block was packed for."""
    packing = f",{instructions}" if instructions else ""
    return f"vllm:{backend.lower()}{packing}{HEADS_OUTERMOST}"


def head_digests(memory: KvMemoryRegion, block_ids: Sequence[int]) -> list[list[int]]:
    """XXH3-64 of each KV head, all its layers, in each block of a region in main memory."""
    layout, piece = memory.layout, memory.piece_bytes
    heads = layout.num_kv_heads
    shape = (layout.num_layers, memory.num_blocks, heads, piece // heads)
    held = (ctypes.c_char * memory.span_bytes).from_address(memory.base_address)
    strides = (memory.layer_stride, piece, piece // heads, 1)
    pool: npt.NDArray[np.uint8] = np.ndarray(shape, np.uint8, memoryview(held), strides=strides)
    return [
        [xxhash.xxh3_64_intdigest(head) for head in np.ascontiguousarray(pool[:, block].swapaxes(0, 1))]
        for block in block_ids
    ]


def read_blocks(memory: KvMemoryRegion, block_ids: Sequence[int]) -> list[memoryview]:
    """What the checksums of blocks in main memory are made from: the digests of all their heads."""
    return packed_digests(head_digests(memory, block_ids))


def packed_digests(blocks: Iterable[Sequence[int]]) -> list[memoryview]:
    """What a block's checksum is made from: the digests of its heads, which do not depend on the number of ranks."""
    return [memoryview(struct.pack(f"<{len(heads)}Q", *heads)) for heads in blocks]
