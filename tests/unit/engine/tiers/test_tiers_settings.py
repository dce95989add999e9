"""Settings of tiers are checked before anything is loaded, and what is made of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.runner.simulated_runner import SimulatedRunner
from engine.tiers import build
from engine.tiers.build import check_tiers, identity_of, make_tiers
from engine.tiers.device_copier import TensorPoolCopier
from engine.tiers.pool_copier import HostPoolCopier, PoolCopier
from engine.tiers.stores.shared_folder import SharedFolder
from engine.worker.metrics import tier_metrics
from kv_transfer.layout import FP8_E4M3, SAME
from splitserve.config.base import load_settings
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from tests.support.engine.numpy_pool import LAYOUT

HOST = {"kv_host_tier_bytes": 2**16}


@pytest.mark.parametrize(
    ("values", "field", "text"),
    [
        ({"kv_disk_tier_path": "kv"}, "engine.kv_disk_tier_path", "needs kv_host_tier_bytes"),
        ({"kv_store_master": "h:1"}, "engine.kv_store_master", "needs kv_host_tier_bytes"),
        (
            {**HOST, "kv_store_master": "h:1", "kv_disk_tier_path": "/tmp"},
            "engine.kv_store_master",
            "takes the place of",
        ),
        ({**HOST, "kv_tier_sharing": "on"}, "engine.kv_tier_sharing", "needs kv_disk_tier_path or"),
        ({**HOST, "prefix_cache": False}, "engine.kv_host_tier_bytes", "needs the prefix cache"),
        ({**HOST, "kind": "vllm"}, "engine.kv_host_tier_bytes", "engine vllm"),
        ({**HOST, "kv_disk_tier_path": "/proc/none"}, "engine.kv_disk_tier_path", "cannot be made"),
    ],
)
def test_what_contradicts_is_refused(values: dict[str, object], field: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        check_tiers(EngineConfig.model_validate(values))
    assert caught.value.field == field


def test_a_store_without_its_package_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    runner = SimulatedRunner(EngineConfig(num_blocks=4))
    config = EngineConfig(kv_host_tier_bytes=2**14, kv_store_master="127.0.0.1:1")
    with pytest.raises(ConfigError, match="needs the package mooncake-transfer-engine-non-cuda") as caught:
        make_tiers(config, runner.pool_memory, SAME)
    assert caught.value.field == "engine.kv_store_master"


@pytest.mark.parametrize("setting", ["kv_host_tier_bytes", "kv_memory_bytes"])
def test_memory_that_no_machine_has_is_one_error(setting: str) -> None:
    config = EngineConfig.model_validate({setting: 2**50})
    with pytest.raises(ConfigError, match="cannot be had") as caught:
        make_tiers(config, SimulatedRunner(config).pool_memory, SAME)
    assert caught.value.field == f"engine.{setting}"


def test_pinned_memory_that_cannot_be_had_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SimulatedRunner(EngineConfig(num_blocks=4))
    monkeypatch.setattr(build, "_pool_copier", lambda memory: TensorPoolCopier(torch.from_numpy(runner.pool)))
    config = EngineConfig(kv_host_tier_bytes=2**50)
    # torch raises a RuntimeError of several lines.
    with pytest.raises(ConfigError, match=r"cannot be had: .*memory") as caught:
        make_tiers(config, runner.pool_memory, SAME)
    assert caught.value.field == "engine.kv_host_tier_bytes"
    assert "\n" not in caught.value.message


def test_bounds_are_named() -> None:
    for name in ("kv_host_tier_bytes", "kv_disk_tier_bytes", "kv_memory_bytes", "contiguous_kv_bytes"):
        with pytest.raises(ConfigError, match=name):
            load_settings(EngineConfig, **{name: 2**50 + 1})
    with pytest.raises(ConfigError, match="kv_host_tier_bytes"):
        load_settings(EngineConfig, kv_host_tier_bytes=5)
    runner = SimulatedRunner(EngineConfig(num_blocks=4, block_size_tokens=1024))
    with pytest.raises(ConfigError, match="hold no KV block") as caught:
        make_tiers(EngineConfig(kv_host_tier_bytes=2**12), runner.pool_memory, SAME)
    assert caught.value.field == "engine.kv_host_tier_bytes"


def test_tiers_are_off_unless_asked_for() -> None:
    runner = SimulatedRunner(EngineConfig(num_blocks=4))
    assert make_tiers(EngineConfig(), runner.pool_memory, SAME) is None
    assert tier_metrics(None) == []


def test_tiers_have_the_bytes_that_were_asked_for(tmp_path: Path) -> None:
    runner = SimulatedRunner(EngineConfig(num_blocks=4))
    config = EngineConfig(kv_host_tier_bytes=2**14, kv_disk_tier_path=tmp_path, kv_disk_tier_bytes=2**15)
    tiers = make_tiers(config, runner.pool_memory, SAME)
    assert tiers is not None
    size = runner.layout.block_bytes
    assert tiers.host.store.slots == 2**14 // size
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2**15
    (held,) = [each for each in tier_metrics(tiers) if each.name == "splitserve_kv_tier_bytes"]
    assert {sample.labels["tier"]: sample.value for sample in held.samples} == {"host": 0, "disk": 0}
    tiers.close()


def test_a_shared_folder_is_made_of_the_same_settings(tmp_path: Path) -> None:
    runner = SimulatedRunner(EngineConfig(num_blocks=4))
    most = 2000 * runner.layout.block_bytes
    config = EngineConfig(
        kv_host_tier_bytes=2**14, kv_disk_tier_path=tmp_path, kv_disk_tier_bytes=most, kv_tier_sharing="on"
    )
    check_tiers(config)
    with pytest.raises(ConfigError, match="must be at least") as caught:
        make_tiers(config.model_copy(update={"kv_disk_tier_bytes": most // 16}), runner.pool_memory, SAME)
    assert caught.value.field == "engine.kv_disk_tier_bytes"
    both = [make_tiers(config, runner.pool_memory, SAME) for _ in range(2)]
    for tiers in both:
        assert tiers is not None
        assert isinstance(tiers.all["disk"].store, SharedFolder)
        assert tiers.look_ups is not None
        tiers.close()


def test_every_part_of_a_layout_is_in_its_identity() -> None:
    others = [
        replace(LAYOUT, model_fingerprint="other"),
        replace(LAYOUT, dtype="float16"),
        replace(LAYOUT, dtype="int8"),
        replace(LAYOUT, block_size_tokens=LAYOUT.block_size_tokens * 2),
        replace(LAYOUT, axis_order="other"),
        replace(LAYOUT, quantization="int8"),
        replace(LAYOUT, engine_version="2"),
    ]
    found = {identity_of(layout, SAME) for layout in (LAYOUT, *others)} | {identity_of(LAYOUT, FP8_E4M3)}
    assert len(found) == len(others) + 2
    assert all(len(each) == 32 for each in found)


@pytest.mark.parametrize("kind", ["host", "tensor"])
def test_blocks_are_copied_both_ways(kind: str) -> None:
    runner = SimulatedRunner(EngineConfig(num_blocks=4))
    copier: PoolCopier = HostPoolCopier(runner.pool_memory)
    if kind == "tensor":
        copier = TensorPoolCopier(torch.from_numpy(runner.pool))
    size = runner.layout.block_bytes
    memory = copier.host_memory(2 * size)
    runner.pool[1] = 7
    copier.save(1, memory[size:])
    assert bytes(memory[size:]) == bytes([7]) * size
    copier.load(2, memory[size:])
    copier.load(3, memoryview(bytes([9]) * size))
    assert [int(runner.pool[block].min()) for block in range(4)] == [0, 7, 7, 9]
