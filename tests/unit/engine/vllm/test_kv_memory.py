"""KV in rows, one a layer, as a memory region; needs no vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from engine.vllm.kv_memory import FileTensors, fingerprint_of, head_digests, kv_region, read_blocks
from splitserve.errors import UnsupportedModelError

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 5, 2, 4, 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2, 3)}, str(tmp_path / "model-1.safetensors"))
    save_file({"b": torch.zeros(4)}, str(tmp_path / "model-2.safetensors"))
    return tmp_path


def test_a_region_of_rows() -> None:
    pool = torch.arange(LAYERS * BLOCKS * HEADS * TOKENS * WIDTH, dtype=torch.float32)
    layers = pool.view(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
    memory = kv_region({str(n): layers[n] for n in range(LAYERS)}, "print", "order", "v")
    layout = memory.layout
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (LAYERS, HEADS, WIDTH // 2)
    assert (layout.block_size_tokens, layout.dtype, layout.axis_order) == (TOKENS, "float32", "order")
    assert layout.block_bytes == layers[:, 0].nbytes
    assert memory.piece_bytes == layers[0, 0].nbytes
    assert memory.span_bytes == pool.nbytes
    assert memory.rows == tuple(layers[n].data_ptr() for n in range(LAYERS))
    assert layout.model_fingerprint == "print"
    heads = [layers[:, 3, head].contiguous().numpy().tobytes() for head in range(HEADS)]
    assert head_digests(memory, [3]) == [[xxhash.xxh3_64_intdigest(head) for head in heads]]
    assert len(read_blocks(memory, [3, 0])[0]) == HEADS * 8


def test_other_shapes_are_refused() -> None:
    layers = torch.zeros(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
    uneven = {"0": layers[0], "1": layers[1], "2": torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH)}
    unequal = {"0": layers[0], "1": layers[1][:, :1]}
    for tensors in (uneven, unequal, {"0": layers[0].double()}, {"0": layers[0][0]}):
        with pytest.raises(UnsupportedModelError):
            kv_region(tensors, "print", "order", "v")


def test_fingerprints_follow_weights_and_settings(folder: Path) -> None:
    before = fingerprint_of(folder, {"layers": 1})
    assert fingerprint_of(folder, {"layers": 2}) != before
    save_file({"b": torch.ones(4)}, str(folder / "model-2.safetensors"))
    assert fingerprint_of(folder, {"layers": 1}) != before


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        FileTensors(tmp_path)
