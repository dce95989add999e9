"""Lanes: how KV travels from this worker to a peer, and whether it is as fast as expected. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LaneKind = Literal["tcp", "local", "rdma", "unknown"]

MIN_DIRECT_GB_PER_S = 0.5
"""Lowest acceptable speed of a lane that can avoid TCP. Between two processes on two cores, process_vm_writev
reached 4.6-30 GB/s, depending on caches, and loopback TCP 1.6-6 GB/s. Speed alone does not separate the two, so
`lane_problem` also checks the kind."""
DeviceLink = Literal["nvlink", "pcie", "host"]
LEAST_DEVICE_GB_PER_S: Mapping[DeviceLink, float] = {"nvlink": 40.0, "pcie": 6.0, "host": 1.5}
"""What each way between the memories of two devices of one machine gives at least, fastest first, by its nominal rate:
NVLink 56 to 450 GB/s a direction, PCIe 12 (3.0) to 64 (5.0) with peer access, and copies through main memory about half
of PCIe or less. Far below nominal, because a probe of 16 MiB measures latency, too. Not measured by us."""
MIN_BANDWIDTH_PROBE_BYTES = 2**20
"""Smaller probe writes measure latency rather than bandwidth."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A measured lane. 1 GB is 10^9 bytes; `gb_per_s` is 0 when no write was acknowledged.

    `kind` is inferred: "tcp" if this machine's network interfaces counted the bytes; else "local" for a peer on
    this machine (shared memory, process_vm_writev, CUDA IPC) and "rdma" for one on another machine.
    """

    agent_id: str
    kind: LaneKind
    gb_per_s: float
    latency_s: float
    largest_write_bytes: int
    same_host: bool
    memory_kind: str = "DRAM"
    """"DRAM" or "VRAM", the same at both ends."""


@dataclass(frozen=True, slots=True)
class JudgedLane:
    """A lane and its problem, if any; `refused` if the pair must not be used because of it."""

    lane: Lane
    problem: str | None
    refused: bool


def lane_kind(*, through_network: bool | None, same_host: bool) -> LaneKind:
    """The kind that follows from the interface counters; `through_network` is None if they are unknown."""
    if through_network is None:
        return "unknown"
    if through_network:
        return "tcp"
    return "local" if same_host else "rdma"


def device_link(lane: Lane) -> DeviceLink | None:
    """The way between two devices of one machine that a lane is as fast as; None if slower, or for another lane."""
    if lane.memory_kind != "VRAM" or not lane.same_host or lane.kind == "tcp":
        return None
    return next((link for link, least in LEAST_DEVICE_GB_PER_S.items() if lane.gb_per_s >= least), None)


def lane_problem(lane: Lane, expected_gb_per_s: float | None, *, has_rdma: bool) -> str | None:
    """One line on why a lane is slower than expected, with its GB/s; None if it is not.

    With `expected_gb_per_s` None, a peer on this machine, or on another one if this one has RDMA devices, must
    be reached without TCP and at `MIN_DIRECT_GB_PER_S` or more; between devices of one machine as fast as over PCIe,
    without a detour through main memory. 0 disables the check.
    """
    if expected_gb_per_s == 0:
        return None
    if lane.gb_per_s == 0:
        return "0 GB/s: no probe write was acknowledged in time"
    measured = f"{lane.gb_per_s:.2f} GB/s over {lane.kind}"
    if expected_gb_per_s is not None:
        slow = lane.gb_per_s < expected_gb_per_s
        return f"{measured}, at least {expected_gb_per_s:g} GB/s expected" if slow else None
    if not (lane.same_host or has_rdma):
        return None
    if lane.kind == "tcp":
        why = "is on the same machine" if lane.same_host else "should be reached over RDMA"
        return f"{measured}, though the peer {why}"
    if lane.largest_write_bytes < MIN_BANDWIDTH_PROBE_BYTES:
        return None
    if lane.memory_kind == "VRAM" and lane.same_host:
        return _device_problem(lane, measured)
    if lane.gb_per_s < MIN_DIRECT_GB_PER_S:
        return f"{measured}, at least {MIN_DIRECT_GB_PER_S:g} GB/s expected"
    return None


def _device_problem(lane: Lane, measured: str) -> str | None:
    link, least = device_link(lane), LEAST_DEVICE_GB_PER_S["pcie"]
    if link == "host":
        return f"{measured}, as copies through main memory give; at least {least:g} GB/s expected between devices"
    return f"{measured}, at least {least:g} GB/s expected between devices" if link is None else None
