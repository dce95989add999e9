"""Lanes: measured with writes to probe blocks only, checked for kind and speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.lanes import (
    MAX_PROBE_BLOCKS,
    MAX_WRITE_BLOCKS,
    MIN_BANDWIDTH_PROBE_BYTES,
    MIN_DIRECT_GB_PER_S,
    PROBE_BYTES,
    SMALL_WRITES,
    TIMEOUT_S,
    Lane,
    LaneKind,
    LaneProber,
    device_link,
    lane_kind,
    lane_problem,
    probe_blocks,
    write_plan,
)
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import PollResult, TransferEndpoint
from tests.support.transfer.numpy_pool import LAYOUT
from tests.support.transfer.scripted_transport import ScriptedTransport

OWN = KvMemoryRegion(4096, 100, LAYOUT, probe_blocks=20)
THEIRS = KvMemoryRegion(4096, 60, LAYOUT, probe_blocks=10)
PEER = TransferEndpoint("peer", "scripted", b"", THEIRS, host_id="here")
FAST = Lane("peer", "local", 5.0, 1e-5, MIN_BANDWIDTH_PROBE_BYTES, same_host=True)


class Line(ScriptedTransport):
    """Completes each write after its transmission time; `network` counts the bytes at the interfaces."""

    def __init__(self, gb_per_s: float, *, network: bool = False) -> None:
        super().__init__("peer")
        self.now = 100.0
        self.network_bytes = 0
        self._gb_per_s = gb_per_s
        self._network = network
        self._due_s: dict[int, float] = {}

    def write(self, *args: object) -> int:
        handle = super().write(*args)  # type: ignore[arg-type]
        size = len(self.writes[handle].local) * LAYOUT.block_bytes
        if self._gb_per_s:
            self._due_s[handle] = self.now + size / self._gb_per_s / 1e9
        self.network_bytes += size if self._network else 0
        return handle

    def poll(self) -> PollResult:
        for handle in [handle for handle, due_s in self._due_s.items() if due_s <= self.now]:
            del self._due_s[handle]
            self.end(handle)
        return super().poll()

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def prober(self, own: KvMemoryRegion = OWN) -> LaneProber:
        return LaneProber(
            self, own, "here", lambda: self.network_bytes, clock=lambda: self.now, sleep=self.sleep
        )


def measure(line: Line, endpoint: TransferEndpoint = PEER) -> Lane:
    prober = line.prober()
    prober.add(endpoint)
    for _ in range(100_000):
        before = line.now
        prober.poll()
        assert line.now - before < 0.01, "a turn of the engine thread stays short"
        if not prober.active:
            (lane,) = prober.take()
            return lane
        line.now += 0.0005
    raise AssertionError("the measurement does not end")


@pytest.mark.parametrize("gb_per_s", [0.001, 0.05, 0.5, 5.0])
def test_the_speed_is_found(gb_per_s: float) -> None:
    lane = measure(Line(gb_per_s))
    assert lane.gb_per_s == pytest.approx(gb_per_s, rel=0.3)
    assert (lane.agent_id, lane.kind, lane.same_host) == ("peer", "local", True)
    assert lane.latency_s > 0


@pytest.mark.parametrize(("network", "kind"), [(True, "tcp"), (False, "local")])
def test_the_network_s_counters_tell_the_kind(network: bool, kind: str) -> None:
    assert measure(Line(1.0, network=network)).kind == kind


def test_a_peer_on_another_machine_that_bypasses_the_network_has_rdma() -> None:
    assert measure(Line(1.0), replace(PEER, host_id="there")).kind == "rdma"


def test_only_probe_blocks_are_written_and_read() -> None:
    line = Line(1.0)
    measure(line)
    assert len(line.writes) > SMALL_WRITES
    for write in line.writes.values():
        assert set(write.local) <= set(range(80, 100))
        assert set(write.remote) <= set(range(50, 60))
        assert write.notification is None


def test_a_peer_that_never_acknowledges_is_given_up() -> None:
    line = Line(0.0)
    begun = line.now
    lane = measure(line)
    assert lane.gb_per_s == 0
    assert line.now - begun < TIMEOUT_S + 0.1


def test_a_failed_write_ends_the_measurement() -> None:
    line = Line(0.0)
    prober = line.prober()
    prober.add(PEER)
    prober.poll()
    line.disconnect("peer")
    prober.poll()
    assert not prober.active
    assert prober.take()[0].gb_per_s == 0


def test_without_probe_blocks_nothing_is_written() -> None:
    line = Line(1.0)
    bare = replace(PEER, memory=replace(THEIRS, probe_blocks=0))
    assert measure(line, bare).gb_per_s == 0
    assert not line.writes


def test_a_forgotten_peer_is_not_reported() -> None:
    prober = Line(0.0).prober()
    prober.add(PEER)
    prober.poll()
    prober.forget("peer")
    assert not prober.active
    assert prober.take() == []


@pytest.mark.parametrize("block_bytes", [128, 1024, 368_640, 5_242_880, 2**26])
def test_sizes_stay_within_bounds(block_bytes: int) -> None:
    blocks, plan = probe_blocks(block_bytes), write_plan(block_bytes)
    assert 1 <= blocks <= MAX_PROBE_BLOCKS
    assert blocks == 1 or blocks * block_bytes <= PROBE_BYTES
    assert plan[:SMALL_WRITES] == [1] * SMALL_WRITES
    assert max(plan) <= MAX_WRITE_BLOCKS
    assert plan == sorted(plan)


@pytest.mark.parametrize(
    ("through_network", "same_host", "kind"),
    [
        (True, True, "tcp"),
        (True, False, "tcp"),
        (False, True, "local"),
        (False, False, "rdma"),
        (None, True, "unknown"),
    ],
)
def test_kinds(through_network: bool | None, same_host: bool, kind: LaneKind) -> None:
    assert lane_kind(through_network=through_network, same_host=same_host) == kind


def test_what_is_expected_by_default() -> None:
    far = replace(FAST, kind="tcp", same_host=False)
    slow = replace(FAST, gb_per_s=MIN_DIRECT_GB_PER_S / 2)
    assert lane_problem(FAST, None, has_rdma=False) is None
    assert lane_problem(far, None, has_rdma=False) is None, "nothing better is there"
    assert lane_problem(replace(slow, largest_write_bytes=4096), None, has_rdma=False) is None
    for lane in (replace(FAST, kind="tcp"), slow, far):
        problem = lane_problem(lane, None, has_rdma=True)
        assert problem is not None
        assert f"{lane.gb_per_s:.2f} GB/s over {lane.kind}" in problem


@pytest.mark.parametrize(
    ("gb_per_s", "link", "problem"),
    [
        (210.0, "nvlink", None),
        (40.0, "nvlink", None),
        (22.0, "pcie", None),
        (6.0, "pcie", None),
        (5.9, "host", "as copies through main memory give; at least 6 GB/s expected between devices"),
        (1.5, "host", "as copies through main memory give; at least 6 GB/s expected between devices"),
        (0.8, None, "0.80 GB/s over local, at least 6 GB/s expected between devices"),
    ],
)
def test_lanes_between_devices_of_one_machine(gb_per_s: float, link: str | None, problem: str | None) -> None:
    lane = replace(FAST, gb_per_s=gb_per_s, memory_kind="VRAM")
    assert device_link(lane) == link
    found = lane_problem(lane, None, has_rdma=False)
    assert (found is None) == (problem is None)
    assert problem is None or str(found).endswith(problem)
    assert lane_problem(lane, 0.1, has_rdma=False) is None, "an expectation of one's own comes first"


def test_what_is_no_lane_between_devices() -> None:
    for lane in (FAST, replace(FAST, kind="tcp", memory_kind="VRAM")):
        assert device_link(lane) is None
    far = replace(FAST, kind="rdma", memory_kind="VRAM", same_host=False)
    assert device_link(far) is None
    assert lane_problem(far, None, has_rdma=True) is None
    assert "same machine" in str(lane_problem(replace(far, kind="tcp", same_host=True), None, has_rdma=False))
    short = replace(FAST, memory_kind="VRAM", gb_per_s=0.1, largest_write_bytes=4096)
    assert lane_problem(short, None, has_rdma=False) is None
    line = Line(5.0)
    prober = line.prober(replace(OWN, memory_kind="VRAM"))
    prober.add(PEER)
    while prober.active:
        prober.poll()
    assert [lane.memory_kind for lane in prober.take()] == ["VRAM"]


def test_an_expectation_of_one_s_own_judges_the_speed_alone() -> None:
    tcp = replace(FAST, kind="tcp")
    assert lane_problem(tcp, 4.0, has_rdma=True) is None
    assert lane_problem(tcp, 6.0, has_rdma=True) == "5.00 GB/s over tcp, at least 6 GB/s expected"
    assert lane_problem(replace(tcp, gb_per_s=0.0), 0, has_rdma=True) is None
    assert "no probe write" in str(lane_problem(replace(FAST, gb_per_s=0.0), None, has_rdma=False))
