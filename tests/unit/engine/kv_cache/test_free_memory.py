"""Free memory under the limits of control groups, and KV that does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kv_cache.memory import KvCacheMemory, free_memory
from kv_transfer.layout import KvLayout
from splitserve.errors import ConfigError

GIB = 1 << 30


def machine(folder: Path, groups: str, available_kib: int = 8 << 20) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (folder / "self/cgroup").write_text(groups)
    return folder


def group(folder: Path, names: tuple[str, str, str], limit: object, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
ACTIVE = ("memory.max", "memory.current", "active_file")


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    proc = machine(tmp_path / "proc", "0::/a.slice\n")
    group(tmp_path / "cgroup/a.slice", V2, "max", 4 * GIB, 0)
    assert free_memory(proc, tmp_path / "cgroup") == 8 * GIB


def test_the_narrowest_limit_above_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    proc = machine(tmp_path / "proc", "0::/a.slice/b.scope\n")
    group(tmp_path / "cgroup/a.slice/b.scope", V2, "max", 0, 0)
    group(tmp_path / "cgroup/a.slice", V2, 6 * GIB, 4 * GIB, GIB)
    assert free_memory(proc, tmp_path / "cgroup") == 3 * GIB
    group(tmp_path / "cgroup/a.slice", ACTIVE, 6 * GIB, 4 * GIB, 2 * GIB)
    assert free_memory(proc, tmp_path / "cgroup") == 4 * GIB


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    proc = machine(tmp_path / "proc", "9:cpu:/docker/x\n0::/docker/x\n")
    group(tmp_path / "cgroup", V2, 2 * GIB, 3 * GIB, 0)
    assert free_memory(proc, tmp_path / "cgroup") == 0


def test_what_is_unknown_limits_nothing(tmp_path: Path) -> None:
    assert free_memory(tmp_path, tmp_path) is None


def test_kv_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KvLayout(
        num_layers=1,
        num_kv_heads=1,
        head_dim=16,
        block_size_tokens=16,
        dtype="float32",
        model_fingerprint="m",
    )
    monkeypatch.setattr("engine.kv_cache.memory.free_memory", lambda: 1 << 20)
    KvCacheMemory(layout, 2, torch.device("cpu"))
    with pytest.raises(ConfigError, match="1048576 bytes of memory are free") as refused:
        KvCacheMemory(layout, 1 << 20, torch.device("cpu"))
    assert refused.value.field == "engine.kv_memory_bytes"
