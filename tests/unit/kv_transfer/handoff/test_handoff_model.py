"""Stateful test: reservations, writers and a network that drops, duplicates and reorders messages.

Writers obey the rule that tests/unit/kv_transfer/handoff/test_pusher.py checks for `KvPusher`: they post nothing
after their ticket's deadline or their end, and what they posted arrives within the grace period. They may die or
stop responding at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.handoff.messages import WRITE_GRACE_S, Drained, WriteCompletion, encode
from kv_transfer.handoff.reservation_table import (
    Abort,
    Action,
    Admit,
    ReleaseWriter,
    ReservationTable,
    Silence,
    WriterDone,
)
from tests.support.handoff.inspection import quarantined_blocks

BLOCKS, EPOCH, QUARANTINE_S, LIMIT_S = 8, 3, 6.0, 40.0
PICK = st.integers(0, 10**6)


@dataclass
class Writer:
    """A prefill worker that holds one ticket."""

    number: int
    blocks: list[int]
    posts_until_s: float
    ended: bool = False

    @property
    def lands_until_s(self) -> float:
        return self.posts_until_s + WRITE_GRACE_S


@dataclass
class Request:
    """A request as the engine of the decode worker sees it."""

    name: str
    coordinator: str
    blocks: list[int]
    deadline_s: float


class HandoffModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = ReservationTable(EPOCH, quarantine_s=QUARANTINE_S)
        self.free = list(range(BLOCKS))
        self.content: dict[int, int] = dict.fromkeys(range(BLOCKS), 0)
        self.requests: dict[int, Request] = {}
        self.quarantine: dict[int, list[int]] = {}
        self.running: set[int] = set()
        self.admitted: set[int] = set()
        self.writers: list[Writer] = []
        self.network: list[tuple[str, bytes]] = []
        self.names = 0

    def apply(self, actions: list[Action] | tuple[Action, ...]) -> None:
        """Applies actions as a decode worker does to its engine."""
        for action in actions:
            if isinstance(action, Abort):
                request = self.requests.pop(action.number)
                assert request.name == action.request_id
                self.running.discard(action.number)
                if action.writer_alive:
                    self.quarantine[action.number] = request.blocks
                else:
                    self.free += request.blocks
            elif isinstance(action, ReleaseWriter):
                self.free += self.quarantine.pop(action.number)
            else:
                assert isinstance(action, Silence)

    @rule(count=st.integers(0, 4), ttl=st.floats(1, 20), travel=st.floats(0, 4.9), who=st.sampled_from("xy"))
    def reserve(self, count: int, ttl: float, travel: float, who: str) -> None:
        count = min(count, len(self.free))
        blocks, self.free = self.free[:count], self.free[count:]
        self.names += 1
        name, end = f"r{self.names}", self.now + LIMIT_S
        number = self.table.open(name, who, count, 10, end, self.now, self.now + ttl)
        self.requests[number] = Request(name, who, blocks, end)
        self.writers.append(Writer(number, blocks, self.now + ttl + travel))

    @precondition(lambda self: self.writers)
    @rule(pick=PICK, how=st.sampled_from(["write", "complete", "drain", "die", "bind", "end"]))
    def writer_acts(self, pick: int, how: str) -> None:
        writer = self.writers[pick % len(self.writers)]
        agent_id = f"p{writer.number}"
        if how == "bind":
            self.table.bind_writer(writer.number, agent_id)
        elif how == "die":
            self.writers.remove(writer)
        elif how == "end":  # the process ends, and the decode worker is notified
            writer.ended, writer.posts_until_s = True, min(writer.posts_until_s, self.now)
            self.table.bind_writer(writer.number, agent_id)
            self.table.writer_lost(agent_id, self.now)
        elif how == "drain" and not writer.ended:
            self.writers.remove(writer)
            self.network.append((agent_id, encode(Drained(EPOCH, writer.number))))
        elif self.now < writer.lands_until_s:
            for block in writer.blocks:
                self.content[block] = writer.number
                assert self.owner_of(block) == writer.number, "a write hit another request's block"
            if how == "complete" and self.now < writer.posts_until_s:
                self.writers.remove(writer)
                done = WriteCompletion(EPOCH, writer.number, 10 * len(writer.blocks), writer.number)
                self.network.append((agent_id, encode(done)))

    @precondition(lambda self: self.network)
    @rule(pick=PICK, how=st.sampled_from(["deliver", "deliver", "double", "drop"]))
    def network_acts(self, pick: int, how: str) -> None:
        index = pick % len(self.network)
        agent_id, data = self.network[index] if how == "double" else self.network.pop(index)
        if how == "drop":
            return
        verdict = self.table.on_notification(agent_id, data, self.now)
        if isinstance(verdict, Admit):
            request = self.requests[verdict.number]
            assert verdict.number not in self.admitted, "admitted twice"
            assert verdict.first_token == verdict.number
            assert self.now < request.deadline_s
            assert all(self.content[block] == verdict.number for block in request.blocks)
            self.admitted.add(verdict.number)
            self.running.add(verdict.number)
        elif isinstance(verdict, WriterDone):
            self.apply(verdict.actions)

    @rule(data=st.binary(max_size=40), epoch=st.integers(1, 4), number=st.integers(0, 20))
    def noise(self, data: bytes, epoch: int, number: int) -> None:
        before = len(self.table._live), quarantined_blocks(self.table)
        self.table.on_notification("stranger", b"\xff" + data, self.now)
        self.table.on_notification("stranger", encode(WriteCompletion(epoch, number, 7, 0)), self.now)
        assert (len(self.table._live), quarantined_blocks(self.table)) == before

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, wrong=st.booleans())
    def abort(self, pick: int, wrong: bool) -> None:
        request = list(self.requests.values())[pick % len(self.requests)]
        who = "stranger" if wrong else request.coordinator
        self.apply(self.table.abort(request.name, who, False, self.now))

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        number = sorted(self.running)[pick % len(self.running)]
        self.running.remove(number)
        request = self.requests.pop(number)
        assert all(self.content[block] == number for block in request.blocks), "KV changed under a request"
        self.table.started(request.name)
        self.table.finished(request.name)
        self.free += request.blocks

    @rule(who=st.sampled_from("xy"))
    def coordinator_is_lost(self, who: str) -> None:
        """As a decode worker does at the end of a coordinator's lease."""
        for request in [request for request in self.requests.values() if request.coordinator == who]:
            self.apply(self.table.abort(request.name, who, False, self.now))

    @rule(seconds=st.floats(0.01, 8.0))
    def time_passes(self, seconds: float) -> None:
        self.now = min(self.now + seconds, max(self.now, self.table._next_due_s))
        self.apply(self.table.expire(self.now))

    def owner_of(self, block: int) -> int | None:
        owners = [n for n, request in self.requests.items() if block in request.blocks]
        owners += [n for n, blocks in self.quarantine.items() if block in blocks]
        assert len(owners) <= 1, "two owners"
        return owners[0] if owners else None

    @invariant()
    def blocks_have_one_place(self) -> None:
        held = [b for r in self.requests.values() for b in r.blocks]
        held += [b for blocks in self.quarantine.values() for b in blocks]
        assert sorted(self.free + held) == list(range(BLOCKS))

    @invariant()
    def table_agrees(self) -> None:
        assert len(self.table._live) == len(self.requests)
        assert quarantined_blocks(self.table) == sum(len(blocks) for blocks in self.quarantine.values())
        assert all(request.deadline_s > self.now for request in self.requests.values())

    def teardown(self) -> None:
        """Everything ends by its deadline, without any further message."""
        self.now += LIMIT_S + max(QUARANTINE_S, 2 * WRITE_GRACE_S)
        self.apply(self.table.expire(self.now))
        self.now += max(QUARANTINE_S, 2 * WRITE_GRACE_S)
        self.apply(self.table.expire(self.now))
        assert sorted(self.free) == list(range(BLOCKS))
        assert len(self.table._live) == 0
        assert self.table._next_due_s == float("inf")


HandoffModel.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
test_handoff_model = HandoffModel.TestCase
