"""Lanes: how KV travels from this worker to a peer, how fast, and whether that is as fast as expected.

`LaneProber` measures with a few writes of increasing size into the peer's probe blocks, which no request owns. It runs
on the transport's thread; one `poll` waits at most `MAX_POLL_S` for a posted write, later polls pick it up. Peers are
measured one at a time, once each, at first contact. `PeerLanes` judges the measured lanes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import PollResult, TransferEndpoint, Transport
from splitserve.errors import FailedPreconditionError, SplitserveError
from splitserve.host_facts import network_bytes_sent, rdma_devices
from splitserve.logs import log_event

LaneKind = Literal["tcp", "local", "rdma", "unknown"]

MIN_DIRECT_GB_PER_S = 0.5
"""Lowest acceptable speed of a lane that can avoid TCP. Between two processes on two cores, process_vm_writev
reached 4.6-30 GB/s, depending on caches, and loopback TCP 1.6-6 GB/s. Speed alone does not separate the two, so
`lane_problem` also checks the kind."""
DeviceLink = Literal["nvlink", "pcie", "host"]
LEAST_DEVICE_GB_PER_S: Mapping[DeviceLink, float] = {"nvlink": 40.0, "pcie": 6.0, "host": 1.5}
"""Lowest measured speed by which a link between two devices of one machine is recognized, fastest link first. Nominal
rates: NVLink 56 to 450 GB/s a direction, PCIe 12 (3.0) to 64 (5.0) with peer access, copies through main memory at most
half of PCIe. The bounds are far lower, because a probe of 16 MiB measures latency, too. Not verified on hardware."""
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
    """The fastest link between two devices of one machine whose bound a lane reaches; None if none, or for another
    lane."""
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


PROBE_BYTES = 4 * 2**20
MAX_PROBE_BLOCKS = 256
WRITE_BYTES = (2**18, 2**20, 2**22, 2**24)
"""Target sizes of the writes. Writes larger than the probe blocks wrap around and overwrite them."""
MAX_WRITE_BLOCKS = 1024
"""Posting costs 0.2 us per block; more tiny blocks would measure that cost instead of the lane."""
SMALL_WRITES = 4
"""Single-block writes for latency; the first one sets the connection up and does not count."""
REPEATS = 2
LONG_WRITE_S = 1e-2
"""A write of this duration is far above the poll interval; larger ones add no information."""
MAX_POLL_S = 2e-3
POLL_INTERVAL_S = 5e-5
"""Sleep between two polls for a write's completion; leaves the core to the peer."""
TIMEOUT_S = 3.0
NETWORK_SHARE = 0.8
"""A write counts as sent over the network if the interfaces counted this share of its bytes."""


def probe_blocks(block_bytes: int) -> int:
    """Number of blocks to reserve for probes: `PROBE_BYTES`, at least one block."""
    return max(1, min(MAX_PROBE_BLOCKS, PROBE_BYTES // block_bytes))


def write_plan(block_bytes: int) -> list[int]:
    """Number of blocks of each write, smallest first."""
    counts = sorted({max(1, min(MAX_WRITE_BLOCKS, size // block_bytes)) for size in WRITE_BYTES})
    return [1] * SMALL_WRITES + [count for count in counts for _ in range(REPEATS)]


@dataclass(slots=True)
class _Write:
    handle: int
    size: int
    posted_s: float
    sent_before: int | None


@dataclass(slots=True)
class _Probe:
    endpoint: TransferEndpoint
    plan: deque[int]
    started_s: float | None = None
    write: _Write | None = None
    small_s: list[float] = field(default_factory=list)
    gb_per_s: dict[int, float] = field(default_factory=dict)
    """Highest speed by size of write in bytes."""
    through_network: bool | None = None


class LaneProber:
    """Measures the lanes from the region `own` on machine `host_id` to its peers.

    `sent_bytes` returns the bytes sent over all network interfaces so far; None if unknown.
    """

    def __init__(
        self,
        transport: Transport,
        own: KvMemoryRegion,
        host_id: str,
        sent_bytes: Callable[[], int | None],
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport = transport
        self._own = own
        self._host_id = host_id
        self._sent_bytes = sent_bytes
        self._clock = clock
        self._sleep = sleep
        self._probes: deque[_Probe] = deque()
        self._lanes: list[Lane] = []

    @property
    def active(self) -> bool:
        """Whether a measurement is pending."""
        return bool(self._probes)

    def add(self, endpoint: TransferEndpoint) -> None:
        """Queues a newly connected peer."""
        self.forget(endpoint.agent_id)
        self._probes.append(_Probe(endpoint, deque(write_plan(self._own.layout.block_bytes))))

    def forget(self, agent_id: str) -> None:
        """Drops a lost peer. Unknown ids are ignored."""
        self._probes = deque(p for p in self._probes if p.endpoint.agent_id != agent_id)

    def poll(self) -> PollResult:
        """Polls the transport at least once and advances the measurement; returns all poll results merged."""
        result = self._transport.poll()
        if not self._probes:
            return result
        deadline_s = self._clock() + MAX_POLL_S
        while self._probes:
            self._advance(self._probes[0], result)
            if self._clock() >= deadline_s:
                break
            more = self._transport.poll()
            result.writes += more.writes
            result.notifications += more.notifications
            if not more.writes:
                self._sleep(POLL_INTERVAL_S)
        return result

    def take(self) -> list[Lane]:
        """Lanes measured since the last call."""
        lanes, self._lanes = self._lanes, []
        return lanes

    def _advance(self, probe: _Probe, result: PollResult) -> None:
        now = self._clock()
        if probe.started_s is None:
            probe.started_s = now
        if probe.write is not None:
            ended = next((w for w in result.writes if probe.write.handle == w.handle), None)
            if ended is None and now - probe.started_s < TIMEOUT_S:
                return
            if ended is None or ended.error is not None:
                self._finish(probe)
                return
            self._record(probe, probe.write, now)
        if probe.plan and min(self._own.probe_blocks, probe.endpoint.memory.probe_blocks) > 0:
            self._post(probe)
        else:
            self._finish(probe)

    def _post(self, probe: _Probe) -> None:
        count, own, theirs = probe.plan.popleft(), self._own, probe.endpoint.memory
        ring = min(own.probe_blocks, theirs.probe_blocks)
        offsets = [number % ring for number in range(count)]
        local, remote = ([side.request_blocks + offset for offset in offsets] for side in (own, theirs))
        before, posted_s = self._sent_bytes(), self._clock()
        try:
            handle = self._transport.write(probe.endpoint.agent_id, local, remote)
        except SplitserveError:
            self._finish(probe)
            return
        probe.write = _Write(handle, count * theirs.layout.block_bytes, posted_s, before)

    def _record(self, probe: _Probe, write: _Write, now: float) -> None:
        seconds = max(now - write.posted_s, 1e-9)
        probe.write = None
        if len(probe.small_s) < SMALL_WRITES:
            probe.small_s.append(seconds)
            return
        speed = write.size / seconds / 1e9
        probe.gb_per_s[write.size] = max(probe.gb_per_s.get(write.size, 0.0), speed)
        after = self._sent_bytes()
        if write.sent_before is not None and after is not None:
            counted = after - write.sent_before >= NETWORK_SHARE * write.size
            # Other traffic is counted too, so one uncounted write is proof that the lane is not TCP.
            probe.through_network = counted and probe.through_network is not False
        if seconds >= LONG_WRITE_S and len(probe.plan) % REPEATS == 0:
            probe.plan.clear()

    def _finish(self, probe: _Probe) -> None:
        self._probes.remove(probe)
        # Small writes measure the CPU caches; two sizes make one outlier harmless.
        largest = sorted(probe.gb_per_s)[-2:]
        same_host = bool(self._host_id) and self._host_id == probe.endpoint.host_id
        self._lanes.append(
            Lane(
                probe.endpoint.agent_id,
                lane_kind(through_network=probe.through_network, same_host=same_host),
                max((probe.gb_per_s[size] for size in largest), default=0.0),
                min(probe.small_s[1:], default=0.0),
                max(largest, default=0),
                same_host,
                self._own.memory_kind,
            )
        )


class PeerLanes:
    """Measures the lane to each peer at first contact and judges it. Runs on the engine thread.

    `expected_gb_per_s` and `policy` are `WorkerConfig.expected_lane_gb_per_s` and `lane_policy`.
    """

    def __init__(
        self,
        transport: Transport,
        endpoint: TransferEndpoint,
        expected_gb_per_s: float | None,
        policy: Literal["warn", "refuse"],
    ) -> None:
        self._transport = transport
        self._prober = LaneProber(transport, endpoint.memory, endpoint.host_id, network_bytes_sent)
        self._expected_gb_per_s = expected_gb_per_s
        self._policy = policy
        self._has_rdma = bool(rdma_devices())
        self._judged: dict[str, JudgedLane] = {}
        self._own_probe_blocks = endpoint.memory.probe_blocks
        self._unmeasured: set[str] = set()
        """Peers without probe blocks on one side, so that only KV of requests can be written to them."""

    @property
    def measuring(self) -> bool:
        """Whether a measurement is pending; the transport must then be polled."""
        return self._prober.active

    def connected(self, endpoint: TransferEndpoint) -> None:
        """Adds a peer that was connected; its lane will be measured if both sides have blocks for it."""
        self.lost(endpoint.agent_id)
        if self._own_probe_blocks and endpoint.memory.probe_blocks:
            self._prober.add(endpoint)
        else:
            self._unmeasured.add(endpoint.agent_id)

    def lost(self, agent_id: str) -> None:
        """Forgets a peer."""
        self._judged.pop(agent_id, None)
        self._unmeasured.discard(agent_id)
        self._prober.forget(agent_id)

    def poll(self) -> PollResult:
        """Polls the transport and advances the measurements; returns what the transport returned."""
        result = self._prober.poll()
        for lane in self._prober.take():
            self._judge(lane)
        return result

    def usable(self) -> frozenset[str]:
        """Agent ids of the peers that are connected and not refused, and measured where they can be."""
        good = self._unmeasured | {name for name, judged in self._judged.items() if not judged.refused}
        return self._transport.connected() & good

    def lanes(self) -> tuple[JudgedLane, ...]:
        """The lanes measured so far."""
        return tuple(self._judged.values())

    def kind_of(self, agent_id: str) -> LaneKind:
        """The kind of a peer's lane; "unknown" if it is gone or not measured yet."""
        judged = self._judged.get(agent_id)
        return judged.lane.kind if judged is not None else "unknown"

    def require_not_refused(self, agent_id: str) -> None:
        """Raises FailedPreconditionError (SLOW_LANE) for a peer with a refused lane."""
        judged = self._judged.get(agent_id)
        if judged is not None and judged.refused:
            message = f"the lane to decode agent {agent_id} is refused: {judged.problem}"
            raise FailedPreconditionError(message, reason="SLOW_LANE")

    def _judge(self, lane: Lane) -> None:
        problem = lane_problem(lane, self._expected_gb_per_s, has_rdma=self._has_rdma)
        refused = problem is not None and self._policy == "refuse"
        self._judged[lane.agent_id] = JudgedLane(lane, problem, refused)
        fields: dict[str, Any] = {
            "agent_id": lane.agent_id,
            "lane": lane.kind,
            "gb_per_s": round(lane.gb_per_s, 3),
            "latency_ms": round(lane.latency_s * 1e3, 3),
        }
        if (link := device_link(lane)) is not None:
            fields["link"] = link
        if problem is None:
            log_event("lane.measured", **fields)
            return
        log_event(
            "lane.slow",
            level=logging.WARNING,
            **fields,
            problem=problem,
            expected_gb_per_s="auto" if self._expected_gb_per_s is None else self._expected_gb_per_s,
            refused=refused,
            advice="splitserve doctor",
        )
