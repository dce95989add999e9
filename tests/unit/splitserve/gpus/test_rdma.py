"""RDMA ports and GPUs as the kernel's files show them, and which are near each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.gpus.rdma import (
    Nearness,
    PciPlace,
    RdmaFacts,
    nearest_nics,
    nearest_ports,
    nearness,
    pci_gpus,
    read_rdma_facts,
)
from tests.support.gpus.kernel_files import FakeMachine, FakeNic, two_sockets


def test_a_machine_with_two_sockets(tmp_path: Path) -> None:
    facts = read_rdma_facts(two_sockets().write(tmp_path))
    assert [(port.name, port.active, port.link_layer) for port in facts.ports] == [
        ("mlx5_0:1", True, "InfiniBand"),
        ("mlx5_1:1", True, "InfiniBand"),
    ]
    assert facts.ports[0].place == PciPlace(("pci0000:15", "0000:15:01.0", "0000:16:01.0", "0000:19:00.0"), 0)
    assert [(gpu.gpu.index, gpu.gpu.uuid, gpu.gpu.address) for gpu in facts.gpus] == [
        (0, "GPU-a", "0000:18:00.0"),
        (1, "GPU-b", "0000:98:00.0"),
    ]
    assert facts.unopenable == ()
    assert facts.peer_memory
    assert [nearest_nics([gpu], facts.ports) for gpu in facts.gpus] == [["mlx5_0:1"], ["mlx5_1:1"]]
    assert nearest_nics(facts.gpus, facts.ports) == ["mlx5_0:1", "mlx5_1:1"]


def test_ports_that_are_down_and_files_that_are_missing(tmp_path: Path) -> None:
    nic = FakeNic("mlx5_0", "pci0000:15/0000:19:00.0", states=("1: DOWN", "4: ACTIVE"), has_file=False)
    facts = read_rdma_facts(FakeMachine(nics=[nic], peer_memory=False).write(tmp_path))
    assert [(port.name, port.state) for port in facts.ports] == [("mlx5_0:1", "DOWN"), ("mlx5_0:2", "ACTIVE")]
    assert facts.unopenable == ("mlx5_0",)
    assert not facts.peer_memory


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert read_rdma_facts(tmp_path) == RdmaFacts()
    assert pci_gpus(tmp_path) == ()


def test_files_that_say_nothing(tmp_path: Path) -> None:
    """A NIC and a GPU without their folders under /sys/devices, as a container's filter may leave them."""
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/gpus/0000:18:00.0").mkdir(parents=True)
    facts = read_rdma_facts(tmp_path)
    assert [(port.name, port.state, port.place) for port in facts.ports] == [("mlx5_0:1", "", PciPlace())]
    assert [(gpu.gpu.uuid, gpu.place) for gpu in facts.gpus] == [("", PciPlace())]


@pytest.mark.parametrize(
    ("one", "other", "between"),
    [
        (PciPlace(("pci0:1", "a", "b", "x")), PciPlace(("pci0:1", "a", "c", "y")), Nearness.SWITCH),
        (PciPlace(("pci0:1", "a", "x")), PciPlace(("pci0:1", "b", "y")), Nearness.HOST_BRIDGE),
        (PciPlace(("pci0:1", "x"), 0), PciPlace(("pci0:2", "y"), 0), Nearness.NUMA_NODE),
        (PciPlace(("pci0:1", "x"), 0), PciPlace(("pci0:2", "y"), 1), Nearness.SYSTEM),
        (PciPlace(), PciPlace(), Nearness.SYSTEM),
    ],
)
def test_what_lies_between_two_devices(one: PciPlace, other: PciPlace, between: Nearness) -> None:
    assert nearness(one, other) is between
    assert nearness(other, one) is between


def test_of_two_behind_one_root_port_the_one_at_the_same_switch(tmp_path: Path) -> None:
    machine = FakeMachine(
        gpus={"GPU-a": ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0", 0)},
        nics=[
            FakeNic("mlx5_0", "pci0000:15/0000:15:01.0/0000:16:01.0/0000:19:00.0"),
            FakeNic("mlx5_1", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:20:00.0"),
            FakeNic(
                "mlx5_2",
                "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:21:00.0",
                states=("1: DOWN",),
            ),
        ],
    )
    facts = read_rdma_facts(machine.write(tmp_path))
    assert [port.name for port in nearest_ports(facts.gpus[0], facts.ports)] == ["mlx5_1:1"]
