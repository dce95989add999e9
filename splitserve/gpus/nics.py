"""How near an RDMA port is to a GPU, and which ports are the nearest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from splitserve.gpus.rdma import PciPlace, PlacedGpu, RdmaPort


class Nearness(IntEnum):
    """What lies between two PCI devices; less is nearer. In brackets the words of `nvidia-smi topo -m`."""

    SWITCH = 0
    """PCIe switches only (PIX, PXB)."""
    HOST_BRIDGE = 1
    """A host bridge of the processor (PHB)."""
    NUMA_NODE = 2
    """Host bridges of one NUMA node (NODE)."""
    SYSTEM = 3
    """The link between NUMA nodes (SYS), or not known."""


IN_WORDS = {
    Nearness.SWITCH: "one PCIe switch",
    Nearness.HOST_BRIDGE: "one host bridge",
    Nearness.NUMA_NODE: "one NUMA node",
    Nearness.SYSTEM: "across NUMA nodes",
}


def nearness(one: PciPlace, other: PciPlace) -> Nearness:
    """What lies between two devices."""
    shared = _shared_steps(one, other)
    if shared > 1:
        return Nearness.SWITCH
    if shared == 1:
        return Nearness.HOST_BRIDGE
    if one.numa_node is not None and one.numa_node == other.numa_node:
        return Nearness.NUMA_NODE
    return Nearness.SYSTEM


def nearest_ports(gpu: PlacedGpu, ports: Sequence[RdmaPort]) -> list[RdmaPort]:
    """The active ports with the least between them and the GPU; of equals those with the longest common way."""
    active = [port for port in ports if port.active]

    def distance(port: RdmaPort) -> tuple[int, int]:
        return nearness(gpu.place, port.place), -_shared_steps(gpu.place, port.place)

    least = min(map(distance, active), default=None)
    return [port for port in active if distance(port) == least]


def nearest_nics(gpus: Sequence[PlacedGpu], ports: Sequence[RdmaPort]) -> list[str]:
    """The nearest active ports of these GPUs, each once, as UCX_NET_DEVICES names them."""
    return list(dict.fromkeys(port.name for gpu in gpus for port in nearest_ports(gpu, ports)))


def _shared_steps(one: PciPlace, other: PciPlace) -> int:
    steps = 0
    for mine, theirs in zip(one.path, other.path, strict=False):
        if mine != theirs:
            break
        steps += 1
    return steps
