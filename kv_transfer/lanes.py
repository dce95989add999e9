"""Lanes: how KV travels from this worker to one peer, and whether that is what one should expect. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LaneKind = Literal["tcp", "local", "rdma", "unknown"]

LEAST_DIRECT_GB_PER_S = 0.5
"""Least speed of a lane that need not be TCP. Between two processes that share two cores, process_vm_writev gave
4.6-30 GB/s, as the caches went, and TCP on loopback 1.6-6 GB/s: speed alone does not tell them apart, so the
kind is judged too."""
JUDGED_BYTES = 2**20
"""Smaller probe writes say more about latency than about bandwidth."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane as measured. GB are 10^9 bytes; `gb_per_s` is 0 when no write was acknowledged.

    `kind` is inferred: "tcp" when the bytes were counted at this machine's network interfaces, else "local" for
    a peer on this machine (shared memory, process_vm_writev, CUDA IPC) and "rdma" for one on another.
    """

    agent_id: str
    kind: LaneKind
    gb_per_s: float
    latency_s: float
    largest_write_bytes: int
    same_host: bool


@dataclass(frozen=True, slots=True)
class JudgedLane:
    """A lane, and what is wrong with it; `refused` when the pair must not be used for it."""

    lane: Lane
    problem: str | None
    refused: bool


def lane_kind(*, through_network: bool | None, same_host: bool) -> LaneKind:
    """What the evidence says; `through_network` is None without any."""
    if through_network is None:
        return "unknown"
    if through_network:
        return "tcp"
    return "local" if same_host else "rdma"


def lane_problem(lane: Lane, expected_gb_per_s: float | None, *, has_rdma: bool) -> str | None:
    """Why a lane is slower than expected, in one line that names the GB/s; None when it is not.

    `expected_gb_per_s` None derives the expectation: a peer on this machine, or on another while this one
    has RDMA devices, must not be reached over TCP nor below `LEAST_DIRECT_GB_PER_S`. 0 expects nothing.
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
    if lane.largest_write_bytes >= JUDGED_BYTES and lane.gb_per_s < LEAST_DIRECT_GB_PER_S:
        return f"{measured}, at least {LEAST_DIRECT_GB_PER_S:g} GB/s expected"
    return None
