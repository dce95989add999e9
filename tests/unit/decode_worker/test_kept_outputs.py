"""`KeptOutputs`, alone and against a coordinator: streams that break, messages that are lost, doubled and late."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.workers.output_stream import OutputCollector
from decode_worker.output_streams import MAX_MESSAGE_BYTES, Attachment, KeptOutputs, Row, message_of, size_of
from splitserve.errors import FailedPreconditionError
from splitserve.generation.output_delta import TokenDelta, rows_of
from splitserve.v1 import decode_pb2, generation_pb2

LENGTH = generation_pb2.FINISH_REASON_LENGTH
PICK = st.integers(0, 10**6)


def output(name: str, position: int, *, last: bool = False, text: str = "") -> Row:
    delta = TokenDelta(position, [position], text)
    if last:
        delta.finish_reason = LENGTH
    return name, delta


def shown(message: decode_pb2.StreamOutputsResponse | None) -> list[tuple[str, list[int]]]:
    assert message is not None
    rows = [(name, news) for name, news in rows_of(message) if isinstance(news, TokenDelta)]
    return [(name, delta.token_ids) for name, delta in rows]


def test_tokens_leave_in_columns_and_all_else_in_messages() -> None:
    logprob = generation_pb2.TokenLogprob(token_id=7, logprob=-0.5)
    admitted = decode_pb2.SequenceOutput(request_id="new", admitted=True)
    rows: list[Row] = [
        ("a", TokenDelta(4, [5], "é")),
        ("b", TokenDelta(9, [1, 2], "")),
        ("scored", TokenDelta(0, [7], "x", logprobs=[logprob])),
        ("ended", TokenDelta(3, [], finish_reason=LENGTH)),
        ("new", admitted),
    ]
    message = message_of(rows)
    assert list(message.tokens.request_ids) == ["a", "b"]
    assert [one.request_id for one in message.outputs] == ["scored", "ended", "new"]
    back = dict(rows_of(decode_pb2.StreamOutputsResponse.FromString(message.SerializeToString())))
    assert back == dict(rows)
    assert not message_of(rows[:1]).tokens.counts
    assert message_of(rows[2:]).HasField("tokens") is False


def test_rows_of_a_request_that_cannot_be_one_stay_in_order() -> None:
    kept = KeptOutputs()
    admitted = decode_pb2.SequenceOutput(request_id="a", admitted=True)
    kept.put([("a", admitted), output("a", 1), output("b", 1), output("a", 7)])
    message = kept.take()
    assert message is not None
    assert [name for name, _ in rows_of(message)] == ["a", "a", "a", "b"]
    assert shown(message) == [("a", [1]), ("a", [7]), ("b", [1])]


@pytest.mark.parametrize(
    "damage",
    [
        {"texts": ["x"]},
        {"first_positions": []},
        {"counts": [2]},
        {"counts": [1, 2]},
        {"counts": [0, 2**32 - 1]},
        {"token_ids": [1]},
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(damage: dict[str, list[Any]]) -> None:
    columns = {"request_ids": ["a", "b"], "first_positions": [1, 2], "token_ids": [1, 2], "texts": ["", ""]}
    damaged = decode_pb2.StreamOutputsResponse(tokens=decode_pb2.StepTokens(**(columns | damage)))
    with pytest.raises(ValueError, match=r"zip|tokens came for counts"):
        list(rows_of(damaged))


@given(st.text(max_size=50), st.lists(st.integers(0, 2**18), min_size=1, max_size=8))
def test_a_message_has_no_more_bytes_than_its_rows_are_counted_for(text: str, token_ids: list[int]) -> None:
    rows = [(f"chatcmpl-{n}", TokenDelta(1000 + n, list(token_ids), text)) for n in range(20)]
    assert message_of(rows).ByteSize() <= sum(map(size_of, rows))


def test_what_waits_is_merged_and_what_was_sent_is_not() -> None:
    kept = KeptOutputs()
    kept.put([output("a", 1), output("b", 1), output("a", 2)])
    assert shown(kept.take()) == [("a", [1, 2]), ("b", [1])]
    assert kept.take() is None
    kept.put([output("a", 3)])
    assert kept.rewind({"a": 0, "b": 0}, {"a", "b"}) == []
    assert shown(kept.take()) == [("a", [1, 2, 3]), ("b", [1])]


def test_a_resumed_stream_goes_on_at_the_next_position() -> None:
    kept = KeptOutputs()
    for position in (1, 2, 3):
        kept.put([output("a", position), output("b", position)])
        kept.take()
    kept.put([output("a", 4)])
    assert kept.rewind({"a": 3, "b": 4}, {"a", "b"}) == []
    assert shown(kept.take()) == [("a", [3, 4])]


def test_acknowledged_messages_are_forgotten() -> None:
    kept = KeptOutputs()
    for position in (1, 2, 3):
        kept.put([output("a", position)])
        kept.take()
    kept.acknowledge(2)
    kept.acknowledge(1)
    kept.acknowledge(2)
    assert kept.sent_bytes > 0
    kept.acknowledge(99)
    assert kept.total_bytes == 0
    kept.put([output("a", 4)])
    kept.take()
    kept.acknowledge(3)
    assert kept.sent_bytes > 0
    kept.acknowledge(4)
    assert kept.sent_bytes == 0


def test_a_request_is_lost_unless_it_lives_or_its_end_is_here() -> None:
    kept = KeptOutputs()
    kept.put([output("ended", 1, last=True), output("live", 1), output("unwanted", 1), output("gone", 1)])
    kept.take()
    positions = {"ended": 0, "live": 0, "gone": 0, "never seen": 0, "reserved": 0}
    assert kept.rewind(positions, {"live", "reserved"}) == ["gone", "never seen"]
    assert ("unwanted", [1]) not in shown(kept.take())


def test_outputs_without_tokens_come_again() -> None:
    kept = KeptOutputs()
    admitted = decode_pb2.SequenceOutput(request_id="a", admitted=True)
    failed = decode_pb2.SequenceOutput(request_id="b", failure=decode_pb2.Failure(reason="X"))
    failed.delta.finish_reason = generation_pb2.FINISH_REASON_ABORT
    kept.put([("a", admitted), ("b", failed)])
    kept.take()
    assert kept.rewind({"a": 0, "b": 7}, {"a"}) == []
    message = kept.take()
    assert message is not None
    assert [(one.request_id, one.admitted, one.failure.reason) for one in message.outputs] == [
        ("a", True, ""),
        ("b", False, "X"),
    ]


def test_much_that_waits_leaves_in_several_messages() -> None:
    kept = KeptOutputs()
    kept.put([output(str(n), 1, text="x" * (MAX_MESSAGE_BYTES // 3)) for n in range(5)])
    kept.put([output("large", 1, text="x" * 2 * MAX_MESSAGE_BYTES)])
    sent = []
    while (message := kept.take()) is not None:
        sent.append(shown(message))
        assert message.ByteSize() < MAX_MESSAGE_BYTES or len(message.tokens.request_ids) == 1
    assert [name for outputs in sent for name, _ in outputs] == ["0", "1", "2", "3", "4", "large"]
    assert len(sent) > 2


class StreamModel(RuleBasedStateMachine):
    """A worker, a coordinator with a few requests, and a network that breaks.

    What the coordinator sends may arrive late, twice, or never, also behind what it sends on the next connection. What
    it reads comes in order, until its stream breaks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attachment, self.kept = Attachment(10.0), KeptOutputs()
        self.produced: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self.live: set[str] = set()
        self.collectors: dict[str, OutputCollector] = {}
        self.received: dict[str, list[int]] = {}
        self.number = self.reading = self.count = 0
        """The coordinator's last stream, the one that it reads (0: none), and messages received on that."""
        self.stream, self.wire = 0, list[decode_pb2.StreamOutputsResponse]()
        self.opens: list[tuple[int, dict[str, int]]] = []
        self.acknowledgements: list[tuple[int, int]] = []
        self.connect()

    def connect(self) -> None:
        """The coordinator gives its stream up and asks for the next one."""
        self.reading, self.number, self.count = 0, self.number + 1, 0
        wanted = {name: c.next_position for name, c in self.collectors.items() if not c.ended}
        self.opens.append((self.number, wanted))

    @precondition(lambda self: self.reading and self.attachment.takes(self.reading))
    @rule(length=st.sampled_from([1, 3, 10**6]))
    def reserve(self, length: int) -> None:
        name = f"r{len(self.ends)}"
        self.ends[name], self.produced[name], self.received[name] = length, 0, []
        self.live.add(name)
        self.collectors[name] = OutputCollector()

    @precondition(lambda self: self.live)
    @rule(pick=PICK, count=st.integers(1, 3))
    def produce(self, pick: int, count: int) -> None:
        name = sorted(self.live)[pick % len(self.live)]
        for _ in range(count):
            if name in self.live:
                position = self.produced[name] = self.produced[name] + 1
                last = position == self.ends[name]
                self.kept.put([output(name, position, last=last)])
                if last:
                    self.live.discard(name)

    @precondition(lambda self: self.opens)
    @rule(pick=PICK, doubled=st.booleans())
    def open_arrives(self, pick: int, doubled: bool) -> None:
        index = pick % len(self.opens)
        number, wanted = self.opens[index] if doubled else self.opens.pop(index)
        try:
            self.attachment.open(number)
            self.stream = number
        except FailedPreconditionError:
            assert number <= self.attachment.number
            return
        self.wire.clear()
        self.live &= set(wanted)
        lost = self.kept.rewind(wanted, self.live)
        if number == self.number:  # the coordinator has not asked for another one meanwhile
            self.reading = number
            for name in lost:
                self.collectors.pop(name, None)

    @precondition(lambda self: self.attachment.is_open)
    @rule()
    def send(self) -> None:
        if (message := self.kept.take()) is not None:
            self.wire.append(message)

    @precondition(lambda self: self.wire and self.reading == self.attachment.number)
    @rule(also_acknowledge=st.booleans())
    def receive(self, also_acknowledge: bool) -> None:
        self.count += 1
        for name, news in rows_of(self.wire.pop(0)):
            if (collector := self.collectors.get(name)) is not None:
                collector.put(news)
                for event in collector.take_all():
                    assert isinstance(event, TokenDelta)
                    self.received[name] += event.token_ids
        if also_acknowledge:
            self.acknowledgements.append((self.reading, self.count))

    @precondition(lambda self: self.acknowledgements)
    @rule(pick=PICK, how=st.sampled_from(["deliver", "double", "drop"]))
    def acknowledgement_arrives(self, pick: int, how: str) -> None:
        index = pick % len(self.acknowledgements)
        entry = self.acknowledgements[index] if how == "double" else self.acknowledgements.pop(index)
        if how != "drop" and self.attachment.takes(entry[0]):
            self.kept.acknowledge(entry[1])

    @rule(worker_notices=st.booleans())
    def connection_breaks(self, worker_notices: bool) -> None:
        if worker_notices and self.attachment.close(self.stream, 0.0):
            self.wire.clear()
        self.connect()

    @precondition(lambda self: self.collectors)
    @rule(pick=PICK, leaves=st.integers(0, 3))
    def client_leaves(self, pick: int, leaves: int) -> None:
        if not leaves:
            del self.collectors[sorted(self.collectors)[pick % len(self.collectors)]]

    @precondition(lambda self: not self.attachment.is_open)
    @rule(ends=st.integers(0, 9))
    def lease_ends(self, ends: int) -> None:
        if not ends:
            self.kept.clear()
            self.live.clear()

    @invariant()
    def nothing_is_doubled_or_missing(self) -> None:
        for received in self.received.values():
            assert received == list(range(1, len(received) + 1))

    def teardown(self) -> None:
        """When the network is well again, the coordinator gets the rest of all that it wants, or knows that it is
        lost."""
        self.connect()
        self.opens = self.opens[-1:]
        self.open_arrives(0, False)
        self.send()
        while self.wire:
            self.receive(False)
        for name in self.collectors:
            assert len(self.received[name]) == self.produced[name]
        assert self.live == {name for name, c in self.collectors.items() if not c.ended}


StreamModel.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
test_stream_model = StreamModel.TestCase
