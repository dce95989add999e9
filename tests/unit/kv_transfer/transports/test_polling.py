"""A transport that is polled in the middle of a step: nothing is lost or doubled."""

from __future__ import annotations

from kv_transfer.transports.polling import PollDealer, idle_poll_s
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


def test_what_arrives_in_a_step_is_taken_after_it_in_order() -> None:
    inner = Talking("peer", "other")
    polls = PollDealer(inner.poll)
    first, second = (inner.write("peer", [block], [block], b"done") for block in (1, 2))
    inner.end(first)
    inner.arriving = [("peer", b"1")]
    polls.poll()
    polls.poll()
    inner.end(second)
    inner.arriving = [("other", b"2")]
    polls.poll()
    assert [write.handle for write in polls.take_writes()] == [first, second]
    assert polls.take_notifications() == [("peer", b"1"), ("other", b"2")]
    polls.poll()
    assert not polls.take_writes()
    assert not polls.take_notifications()
    assert inner.polls == 4


def test_idle_workers_poll_often_where_nothing_else_makes_progress() -> None:
    assert idle_poll_s("nixl", "DRAM") == 1.0
    assert idle_poll_s("nixl", "VRAM") == idle_poll_s("ucx", "DRAM") < 0.1
