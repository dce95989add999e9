"""A reservation finds what other workers have written into a store that they share, where that spares its transfer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from decode_worker.reservation_queue import Granted
from engine.runner.simulated_runner import expected_tokens
from engine.tiers import kv_tiers
from engine.tiers.look_ups import MOST_WAITING, PATIENCE_S
from kv_transfer.handoff.ticket import KvTicket
from splitserve.errors import DeadlineExceededError, SplitserveError
from tests.support.engine.connector_pair import COORDINATOR, MAX_TOKENS, ticket_of
from tests.support.tiers.shared_rig import FakeMooncake
from tests.support.tiers.tiered_pair import TieredPair
from tests.support.tiers.tiers_rig import HandAlarms

pytestmark = pytest.mark.timeout(60)

BLOCK, LENGTH = 8, 44
FULL = LENGTH // BLOCK * BLOCK
SLOW, FAST = 1.0, 1e15
"""Bytes a second of a lane."""
PROMPT = random.Random(0).choices(range(32, 127), k=LENGTH)

Start = Callable[..., TieredPair]


@pytest.fixture
def fake() -> FakeMooncake:
    return FakeMooncake()


@pytest.fixture
def start(fake: FakeMooncake) -> Iterator[Start]:
    """Starts a pair whose decode worker is over the store."""
    pairs = []

    def begin(identity: bytes = bytes(32)) -> TieredPair:
        disk = lambda size: fake.store(size, 64, identity)  # noqa: E731
        pairs.append(TieredPair(64, disk, alarms=HandAlarms("by hand")))
        return pairs[-1]

    yield begin
    fake.may_answer.set()
    for pair in pairs:
        pair.below.close()


@pytest.fixture
def pair(fake: FakeMooncake, start: Start) -> TieredPair:
    """Its decode worker knows nothing of a prompt whose KV another one has had."""
    one = start()
    finish(one, "first", ticket_of(one.reserve("first", PROMPT)))
    assert fake.writes >= FULL // BLOCK
    fake.questions.clear()
    return start()


def finish(pair: TieredPair, name: str, ticket: KvTicket | None, prompt: list[int] = PROMPT) -> None:
    """Has the prompt computed and handed over, and checks every token."""
    if ticket is not None:
        pair.start(name, prompt, ticket)
    pair.rounds(lambda: pair.tokens(name) == expected_tokens(prompt, MAX_TOKENS))
    pair.settle()
    pair.rounds(lambda: pair.consumer.status.in_progress == 0)
    pair.assert_empty()
    assert pair.below.look_ups is not None
    assert not pair.below.look_ups.busy


def granted(pair: TieredPair, answers: list[Granted | SplitserveError]) -> KvTicket:
    pair.settle()
    pair.round()
    return ticket_of(answers)


def test_what_another_worker_has_written_is_read_in_place_of_its_transfer(
    pair: TieredPair, fake: FakeMooncake
) -> None:
    answers = pair.reserve("a", PROMPT, lane_bytes_per_s=SLOW)
    assert answers == []
    assert pair.consumer.status.waiting_reservations == 0, "it does not wait for blocks"
    ticket = granted(pair, answers)
    assert ticket.cached_tokens == FULL
    assert fake.questions == [FULL // BLOCK]
    assert pair.below.all["disk"].stats.found_blocks == FULL // BLOCK
    finish(pair, "a", ticket)


@pytest.mark.parametrize("lane_bytes_per_s", [FAST, 0.0])
def test_nobody_is_asked_where_the_transfer_is_sooner(
    pair: TieredPair, fake: FakeMooncake, lane_bytes_per_s: float
) -> None:
    ticket = ticket_of(pair.reserve("a", PROMPT, lane_bytes_per_s=lane_bytes_per_s))
    assert ticket.cached_tokens == 0
    assert fake.questions == []
    finish(pair, "a", ticket)


def test_nor_where_answers_take_longer_than_they_may_spare(pair: TieredPair, fake: FakeMooncake) -> None:
    assert pair.below.look_ups is not None
    pair.below.look_ups._answers.measured(1, 1e6)
    for count in range(2):
        ticket = ticket_of(pair.reserve(f"{count}", PROMPT, lane_bytes_per_s=1e3))
        assert ticket.cached_tokens == 0
        pair.consumer.abort(pair.decode, f"{COORDINATOR}/{count}", COORDINATOR, True, pair.clock.now)
    assert fake.questions == []
    for _ in range(1000):
        pair.below.look_ups._answers.passed_over()
    assert granted(pair, pair.reserve("a", PROMPT, lane_bytes_per_s=1e3)).cached_tokens == FULL


def test_what_is_known_is_not_asked_again(pair: TieredPair, fake: FakeMooncake) -> None:
    finish(pair, "a", granted(pair, pair.reserve("a", PROMPT, lane_bytes_per_s=SLOW)))
    asked = len(fake.questions)
    ticket = ticket_of(pair.reserve("again", PROMPT, lane_bytes_per_s=SLOW))
    assert ticket.cached_tokens == FULL
    assert len(fake.questions) == asked
    finish(pair, "again", ticket)


def test_a_new_prompt_costs_one_question(pair: TieredPair, fake: FakeMooncake) -> None:
    new = random.Random(1).choices(range(32, 127), k=LENGTH)
    ticket = granted(pair, pair.reserve("new", new, lane_bytes_per_s=SLOW))
    assert ticket.cached_tokens == 0
    assert fake.questions == [FULL // BLOCK]
    finish(pair, "new", ticket, new)


@pytest.mark.parametrize(
    ("identity", "salt"), [(b"?" * 32, b""), (bytes(32), b"another tenant")], ids=["identity", "salt"]
)
def test_another_model_s_or_tenant_s_blocks_are_not_found(
    pair: TieredPair, start: Start, identity: bytes, salt: bytes
) -> None:
    other = start(identity)
    ticket = granted(other, other.reserve("a", PROMPT, lane_bytes_per_s=SLOW, cache_salt=salt))
    assert ticket.cached_tokens == 0
    assert other.below.all["disk"].stats.found_blocks == 0


def test_a_store_that_hangs_is_waited_for_as_long_as_a_prompt_would(
    pair: TieredPair, fake: FakeMooncake
) -> None:
    fake.may_answer.clear()
    late = pair.reserve("late", PROMPT, lane_bytes_per_s=SLOW)
    advance(pair, PATIENCE_S / 2)
    assert late == []
    advance(pair, PATIENCE_S)
    assert ticket_of(late).cached_tokens == 0
    ticket = ticket_of(pair.reserve("next", PROMPT, lane_bytes_per_s=SLOW))
    assert ticket.cached_tokens == 0, "nobody else waits"
    fake.may_answer.set()
    pair.settle()
    for name in ("late", "next"):
        pair.consumer.abort(pair.decode, f"{COORDINATOR}/{name}", COORDINATOR, True, pair.clock.now)
    ticket = granted(pair, pair.reserve("then", PROMPT, lane_bytes_per_s=SLOW))
    assert ticket.cached_tokens == FULL, "a late answer helps the next one"
    finish(pair, "then", ticket)


def test_and_no_longer_than_it_may_spare(pair: TieredPair, fake: FakeMooncake) -> None:
    fake.may_answer.clear()
    answers = pair.reserve("a", PROMPT, lane_bytes_per_s=FULL * 16 / (PATIENCE_S / 2))
    advance(pair, PATIENCE_S * 3 / 4)
    assert ticket_of(answers).cached_tokens == 0
    fake.may_answer.set()
    pair.settle()
    assert len(answers) == 1, "it is told once"


def test_one_that_can_wait_no_longer_does_not_make_the_store_late(
    pair: TieredPair, fake: FakeMooncake
) -> None:
    assert pair.below.look_ups is not None
    fake.may_answer.clear()
    left = pair.reserve("left", [33] * LENGTH, lane_bytes_per_s=FULL * 16 / (PATIENCE_S / 2))
    advance(pair, PATIENCE_S * 3 / 4)
    assert ticket_of(left).cached_tokens == 0
    leave(pair, "left")
    assert pair.below.look_ups.busy
    asks = pair.reserve("asks", PROMPT, lane_bytes_per_s=SLOW)
    assert asks == [], "others still ask"
    advance(pair, PATIENCE_S / 2)
    assert asks == []
    assert ticket_of(pair.reserve("late", [34] * LENGTH, lane_bytes_per_s=SLOW)).cached_tokens == 0
    assert asks == [], "the store's own patience has ended, since the first question"
    leave(pair, "late")
    fake.may_answer.set()
    assert granted(pair, asks).cached_tokens == FULL
    assert (len(left), pair.below.look_ups.busy) == (1, False)
    leave(pair, "asks")
    assert granted(pair, pair.reserve("then", [35] * LENGTH, lane_bytes_per_s=SLOW)).cached_tokens == 0
    assert len(fake.questions) == 3


def test_those_that_do_not_wait_any_more_count_among_those_that_are_asked_for(
    pair: TieredPair, fake: FakeMooncake
) -> None:
    fake.may_answer.clear()
    names = [str(count) for count in range(MOST_WAITING)]
    for count, name in enumerate(names):
        pair.reserve(name, [40 + count] * (BLOCK + 1), lane_bytes_per_s=BLOCK * 16 / (PATIENCE_S / 2))
    advance(pair, PATIENCE_S * 3 / 4)
    leave(pair, *names)
    assert ticket_of(pair.reserve("more", PROMPT, lane_bytes_per_s=SLOW)).cached_tokens == 0
    leave(pair, "more")
    fake.may_answer.set()
    pair.settle()
    pair.round()
    pair.assert_empty()


def leave(pair: TieredPair, *names: str) -> None:
    for name in names:
        pair.consumer.abort(pair.decode, f"{COORDINATOR}/{name}", COORDINATOR, True, pair.clock.now)
    pair.round()


def test_what_it_may_spare_is_not_computed_where_nobody_would_be_asked(
    pair: TieredPair, fake: FakeMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(kv_tiers, "spared_by_more", lambda known, more, *_: asked.append(more) or 0.0)
    pair.reserve("fast", PROMPT, lane_bytes_per_s=FAST)
    assert asked == [], "it could spare nothing"
    fake.may_answer.clear()
    assert pair.below.look_ups is not None
    pair.below.look_ups.ask([bytes(32)], lambda hashes, count: None, 1, lambda: None)
    advance(pair, PATIENCE_S)
    pair.reserve("slow", PROMPT, lane_bytes_per_s=SLOW)
    assert asked == [], "the store is late"
    leave(pair, "fast", "slow")
    fake.may_answer.set()
    pair.settle()
    pair.reserve("then", PROMPT, lane_bytes_per_s=SLOW)
    assert len(asked) == 1


def advance(pair: TieredPair, seconds: float) -> None:
    """Rings what is due by then, and steps."""
    assert isinstance(pair.alarms, HandAlarms)
    pair.alarms.advance(seconds)
    pair.below.collect()
    pair.round()


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_one_that_ends_while_the_store_is_asked_reads_nothing(
    pair: TieredPair, fake: FakeMooncake, how: str
) -> None:
    fake.may_answer.clear()
    answers = pair.reserve("gone", PROMPT, lane_bytes_per_s=SLOW, deadline_s=pair.clock.now + 1)
    if how == "abort":
        assert pair.consumer.abort(pair.decode, f"{COORDINATOR}/gone", COORDINATOR, True, pair.clock.now)
    else:
        pair.clock.now += 2
        pair.round()
        assert isinstance(answers.pop(), DeadlineExceededError)
    fake.may_answer.set()
    pair.settle()
    pair.round()
    assert answers == []
    assert pair.below.all["disk"].stats.read_bytes == 0
    pair.assert_empty()


def test_nothing_is_read_where_others_wait_for_blocks_by_then(pair: TieredPair, fake: FakeMooncake) -> None:
    fake.may_answer.clear()
    answers = pair.reserve("a", PROMPT, lane_bytes_per_s=SLOW)
    big = [random.Random(seed).choices(range(32, 127), k=BLOCK * 12) for seed in (5, 6)]
    ticket_of(pair.reserve("big", big[0]))
    assert pair.reserve("waits", big[1]) == []
    fake.may_answer.set()
    pair.settle()
    assert answers == []
    assert pair.below.all["disk"].stats.read_bytes == 0
    for name in ("big", "waits", "a"):
        pair.consumer.abort(pair.decode, f"{COORDINATOR}/{name}", COORDINATOR, True, pair.clock.now)
    pair.round()
    pair.assert_empty()


def test_no_more_are_asked_for_than_prompts(pair: TieredPair, fake: FakeMooncake) -> None:
    fake.may_answer.clear()
    names = [str(count) for count in range(MOST_WAITING + 1)]
    answers = [
        pair.reserve(name, [40 + count] * (BLOCK + 1), lane_bytes_per_s=1e-6)
        for count, name in enumerate(names)
    ]
    assert [len(each) for each in answers[:-1]] == [0] * MOST_WAITING
    assert ticket_of(answers[-1]).cached_tokens == 0
    for name in names:
        pair.consumer.abort(pair.decode, f"{COORDINATOR}/{name}", COORDINATOR, True, pair.clock.now)
    fake.may_answer.set()
    pair.settle()
    pair.round()
    pair.assert_empty()


def test_a_store_that_fails_or_is_torn_costs_a_transfer(pair: TieredPair, fake: FakeMooncake) -> None:
    fake.fails = True
    ticket = granted(pair, pair.reserve("fails", PROMPT, lane_bytes_per_s=SLOW))
    assert ticket.cached_tokens == 0
    pair.consumer.abort(pair.decode, f"{COORDINATOR}/fails", COORDINATOR, True, pair.clock.now)
    fake.fails = False
    third = list(fake.objects)[2]
    fake.objects[third] = fake.objects[third][:-1]
    ticket = granted(pair, pair.reserve("torn", PROMPT, lane_bytes_per_s=SLOW))
    assert ticket.cached_tokens == 2 * BLOCK, "as far as the one that is torn"
    finish(pair, "torn", ticket)


def test_a_prompt_that_turns_out_to_be_nearly_there_is_computed_here(pair: TieredPair) -> None:
    answers = pair.reserve("a", PROMPT, local_prefill_tokens=BLOCK, lane_bytes_per_s=SLOW)
    pair.settle()
    pair.round()
    assert ticket_of(answers) is None
    pair.settle()
    finish(pair, "a", None)
