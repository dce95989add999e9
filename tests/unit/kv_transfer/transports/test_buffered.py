"""A transport that is polled in the middle of a step: nothing is lost, doubled, or kept of a fenced peer."""

from __future__ import annotations

from kv_transfer.transports.buffered import BufferedTransport
from kv_transfer.transports.factory import idle_poll_s
from kv_transfer.transports.transport import PollResult
from tests.support.transfer.scripted_transport import ScriptedTransport


class Talking(ScriptedTransport):
    """Delivers what the test puts into `arriving`."""

    def __init__(self, *peers: str) -> None:
        super().__init__(*peers)
        self.arriving: list[tuple[str, bytes]] = []
        self.polls = 0

    def poll(self) -> PollResult:
        self.polls += 1
        result = super().poll()
        result.notifications, self.arriving = result.notifications + self.arriving, []
        return result


def test_what_arrives_in_a_step_comes_with_the_next_poll_in_order() -> None:
    inner = Talking("peer", "other")
    transport = BufferedTransport(inner)
    first, second = (transport.write("peer", [block], [block], b"done") for block in (1, 2))
    inner.end(first)
    inner.arriving = [("peer", b"1")]
    transport.progress()
    transport.progress()
    assert transport.needs_poll
    inner.end(second)
    inner.arriving = [("other", b"2")]
    found = transport.poll()
    assert [write.handle for write in found.writes] == [first, second]
    assert found.notifications == [("peer", b"1"), ("other", b"2")]
    assert not transport.needs_poll
    empty = transport.poll()
    assert not empty.writes
    assert not empty.notifications
    assert inner.polls == 4


def test_a_refused_peer_s_notifications_are_dropped() -> None:
    inner = Talking("peer", "other")
    transport = BufferedTransport(inner)
    inner.arriving = [("peer", b"1"), ("other", b"2")]
    transport.progress()
    transport.disconnect("peer")
    assert transport.poll().notifications == [("peer", b"1"), ("other", b"2")]
    inner.arriving = [("peer", b"3"), ("other", b"4")]
    transport.progress()
    transport.refuse("peer")
    assert transport.poll().notifications == [("other", b"4")]


def test_idle_workers_poll_often_where_nothing_else_makes_progress() -> None:
    assert idle_poll_s("nixl", "DRAM") == 1.0
    assert idle_poll_s("nixl", "VRAM") == idle_poll_s("ucx", "DRAM") < 0.1
