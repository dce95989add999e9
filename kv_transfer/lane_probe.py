"""Measures lanes with a few writes of increasing size into the peer's probe blocks, which no request owns.

Runs on the transport's thread. One `poll` waits at most `MAX_POLL_S` for a posted write; later polls pick it up.
Peers are measured one at a time, once each, at first contact.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.lane import Lane, lane_kind
from kv_transfer.transports.descriptors import in_common
from kv_transfer.transports.transport import KvMemoryRegion, PollResult, TransferEndpoint, Transport
from splitserve.errors import SplitserveError

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
    own: KvMemoryRegion
    theirs: KvMemoryRegion
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
        own, theirs = in_common(self._own, endpoint.memory)
        plan = write_plan(own.layout.block_bytes // own.divisions)
        self._probes.append(_Probe(endpoint, own, theirs, deque(plan)))

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
        if probe.plan and min(probe.own.probe_blocks, probe.theirs.probe_blocks) > 0:
            self._post(probe)
        else:
            self._finish(probe)

    def _post(self, probe: _Probe) -> None:
        count, own, theirs = probe.plan.popleft(), probe.own, probe.theirs
        starts = [side.request_blocks * side.divisions for side in (own, theirs)]
        ring = min(own.num_sub_blocks - starts[0], theirs.num_sub_blocks - starts[1])
        offsets = [number % ring for number in range(count)]
        local, remote = ([start + offset for offset in offsets] for start in starts)
        before, posted_s = self._sent_bytes(), self._clock()
        try:
            handle = self._transport.write(probe.endpoint.agent_id, local, remote)
        except SplitserveError:
            self._finish(probe)
            return
        size = theirs.layout.block_bytes // theirs.divisions
        probe.write = _Write(handle, count * size, posted_s, before)

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
