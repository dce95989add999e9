"""The Triton kernels compile for GPUs that are not here, and fit their shared memory."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

SHARED_BYTES = 99 * 1024
"""What a program may take on compute capability 8.6 and 8.9; others allow more."""
HEADS = {"BLOCK_SIZE": 16, "HEAD_DIM": 128, "WINDOW": 4096, "SOFTCAP": 30.0, "GROUP": 4, "DIM": 128}
MODEL_TENSORS = ("query", "key", "value", "keys", "values", "output", "x", "weight", "y", "gate", "up")
MODEL_TENSORS += ("cosines", "sines")
"""In the model's dtype."""
POINTERS = {
    **dict.fromkeys(("parts", "highests", "totals"), "*fp32"),
    **dict.fromkeys(("contexts", "query_starts", "table_starts", "tables", "slots"), "*i64"),
    **dict.fromkeys(("scale", "epsilon"), "fp32"),
}


def compiled(
    kernel: Any, capability: int, constants: dict[str, Any], warps: int, dtype: str = "bfloat16"
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.backends.cuda.attention_tile import LAUNCH

    names = kernel.arg_names
    pointers = POINTERS | dict.fromkeys(MODEL_TENSORS, "*bf16" if dtype == "bfloat16" else "*fp32")
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    options = {"num_warps": warps, **LAUNCH}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled_bytes(cubin: bytes, folder: Path) -> int:
    """What a thread of the kernel keeps in memory for want of registers."""
    from triton import knobs

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = knobs.nvidia.cuobjdump.path
    shown = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", shown.stdout + shown.stderr)))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_fits(
    capability: int, dtype: str, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into shared memory and registers, for what models mostly have: no window, no soft cap."""
    import torch
    import triton.language as tl

    from engine.backends.cuda import decode_attention, prefill_attention
    from engine.backends.cuda.attention_tile import HeadShape

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape, numbers = HeadShape.of(32, 8, head_dim), getattr(torch, dtype)
    heads = HEADS | {"HEAD_DIM": head_dim, "DIM": shape.padded_dim, "WINDOW": 0, "SOFTCAP": 0.0}
    heads |= {"DTYPE": getattr(tl, dtype)}
    tile = prefill_attention._tile(numbers, shape.padded_dim)
    queries = {"PADDED_GROUP": 4, "QUERIES": tile.rows // 4, "KEYS": tile.keys}
    keys = decode_attention.tile_keys(numbers, shape.padded_dim)
    parts = {"ROWS": 16, "SPLITS": 32, "MIN_SIZE": decode_attention.MIN_TOKENS, "KEYS": keys}
    for kernel, constants, warps in (
        (prefill_attention._prefill, heads | queries, tile.warps),
        (decode_attention._decode, heads | parts, decode_attention.tile_warps(numbers, shape.padded_dim)),
    ):
        program = compiled(kernel, capability, constants, warps, dtype)
        assert program.metadata.shared <= SHARED_BYTES
        assert not spilled_bytes(program.asm["cubin"], tmp_path), kernel


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import triton.language as tl

    from engine.backends.cuda import decode_attention, prefill_attention, triton_attention

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tile = prefill_attention._tile(torch.bfloat16, 128)
    parts = {"SPLITS": 32, "MIN_SIZE": decode_attention.MIN_TOKENS, "KEYS": decode_attention.KEYS}
    prefill = {**HEADS, "PADDED_GROUP": 4, "QUERIES": tile.rows // 4, "KEYS": tile.keys, "DTYPE": tl.bfloat16}
    decode = {**HEADS, **parts, "ROWS": 16, "DTYPE": tl.bfloat16}
    join = {
        name: (HEADS | parts)[name] for name in ("HEAD_DIM", "WINDOW", "SPLITS", "MIN_SIZE", "KEYS", "DIM")
    }
    write = {"BLOCK_SIZE": 16, "KV_HEADS": 8, "HEAD_DIM": 128, "HEADS": 8, "DIM": 128}
    for kernel, constants, warps in (
        (prefill_attention._prefill, prefill, tile.warps),
        (decode_attention._decode, decode, 4),
        (decode_attention._join, join, 4),
        (triton_attention._write, write, 4),
    ):
        program = compiled(kernel, capability, constants, warps)
        assert program.asm["cubin"]
        assert program.metadata.shared <= SHARED_BYTES
