"""Placement of local workers on cores and GPUs."""

from __future__ import annotations

import pytest

from splitserve.cluster.placement import Inventory, cuda_devices, make_inventory
from splitserve.cluster.process_specs import cluster_specs
from splitserve.config.cluster import ClusterConfig
from splitserve.errors import ResourceExhaustedError

TWO = ("cuda:0", "cuda:1")


def inventory(workers: int = 4, devices: tuple[str, ...] = TWO) -> Inventory:
    return make_inventory([0, 1, 2, 3], workers, pin_cores=True, devices=devices)


def test_workers_are_spread_over_gpus_and_share_them_in_turn() -> None:
    machine = inventory()
    assert [machine.take(name).device for name in "abcd"] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert sorted(cpu for name in "abcd" for cpu in machine.place_of(name).share.cpus) == [0, 1, 2, 3]  # type: ignore[union-attr]


def test_a_gpu_of_ones_own() -> None:
    machine = inventory()
    machine.take("a", own_device=True)
    machine.take("b", own_device=True)
    with pytest.raises(ResourceExhaustedError, match="none of the 2 GPUs is free") as caught:
        machine.take("c", own_device=True)
    assert caught.value.reason == "NO_GPU"
    assert machine.place_of("c") is None
    machine.release_except({"b"})
    assert machine.take("c", own_device=True).device == "cuda:0"


def test_without_gpus_the_settings_decide() -> None:
    assert inventory(devices=()).take("a", own_device=True).device is None


def test_more_workers_than_shares_take_turns() -> None:
    machine = inventory(workers=2)
    assert [machine.take(name).share.cpus for name in "abc"] == [(0, 1), (2, 3), (0, 1)]


def test_a_freed_share_is_taken_again() -> None:
    machine = inventory()
    for name in "abc":
        machine.take(name)
    machine.release("b")
    assert machine.take("d").share.cpus == (1,)


def test_up_gives_each_worker_its_gpu() -> None:
    specs = cluster_specs(ClusterConfig(prefill=1, decode=2), [0, 1, 2], devices=TWO)
    devices = [spec.command[spec.command.index("--device") + 1] for spec in specs[1:]]
    assert devices == ["cuda:0", "cuda:1", "cuda:0"]
    assert specs[1].layout == "cores 0, 1 thread, cuda:0"


@pytest.mark.parametrize(("kind", "device"), [("simulated", "auto"), ("torch", "cpu"), ("torch", "cuda:1")])
def test_no_gpus_are_looked_for_where_none_are_to_be_chosen(kind: str, device: str) -> None:
    assert cuda_devices(kind, device) == ()
