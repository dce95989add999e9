"""A reservation has of its prefix what the decode worker's tiers bring sooner than a peer, and never waits for more."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from decode_worker.decode_service import _lane_bytes_per_s
from engine.core.engine_core import EngineCore
from engine.core.sequence import Sequence
from engine.runner.simulated_runner import expected_tokens
from engine.tiers import kv_tiers
from engine.tiers.stores.block_store import BlockStore
from kv_transfer.handoff.ticket import KvTicket
from splitserve.errors import DeadlineExceededError, InvalidArgumentError
from splitserve.v1 import decode_pb2
from tests.support.engine.connector_pair import COORDINATOR, MAX_TOKENS, ticket_of
from tests.support.engine.engine_rig import request
from tests.support.tiers.tiered_pair import TieredPair
from tests.support.tiers.tiers_rig import FailingStore

pytestmark = pytest.mark.timeout(60)

BLOCK, LENGTH = 8, 44
FULL = LENGTH // BLOCK * BLOCK
SLOW, FAST = 1.0, 1e15
"""Bytes a second of a lane."""
_made: list[TieredPair] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().below.close()


def prompt(number: int) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(32, 127) for _ in range(LENGTH)]


def pair_of(host_blocks: int = 64, disk: Callable[[int], BlockStore] | None = None) -> TieredPair:
    """The decode worker has answered four prompts; its pool holds the latest, its tiers all."""
    pair = TieredPair(host_blocks, disk)
    _made.append(pair)
    for number in range(4):
        finish(pair, f"first-{number}", number, ticket_of(pair.reserve(f"first-{number}", prompt(number))))
    return pair


def finish(pair: TieredPair, name: str, number: int, ticket: KvTicket) -> None:
    """Has the prompt computed and handed over, and checks every token."""
    wanted = expected_tokens(prompt(number), MAX_TOKENS)
    pair.start(name, prompt(number), ticket)
    pair.rounds(lambda: pair.tokens(name) == wanted)
    pair.settle()
    pair.rounds(lambda: pair.consumer.status.in_progress == 0)
    pair.assert_empty()


def test_a_slow_lane_s_blocks_are_read_back() -> None:
    pair = pair_of()
    answers = pair.reserve("again", prompt(0), lane_bytes_per_s=SLOW)
    assert answers == []
    assert pair.consumer.status.waiting_reservations == 0, "it does not wait for blocks"
    pair.settle()
    pair.round()
    ticket = ticket_of(answers)
    assert ticket.cached_tokens == FULL
    assert pair.below.host.stats.hit_tokens == FULL
    finish(pair, "again", 0, ticket)


@pytest.mark.parametrize("kept", [16, 12])
def test_one_that_waits_is_tried_again_once_no_room_is_kept_for_a_preempted_one(kept: int) -> None:
    """No block becomes free, and none is taken, as where it leaves a read that goes on for others."""
    pair = pair_of()
    assert isinstance(pair.decode, EngineCore)
    kv, preempted = pair.decode._kv, Sequence(request("preempted", prompt(1)), 0)
    kv.reading.add(preempted)
    kv.reading_tokens += preempted.remaining
    kv._kept[preempted] = kept
    answers = pair.reserve("waits", prompt(5))
    pair.round()
    assert answers == []
    assert pair.consumer.status.load.kept_blocks == kept
    kv.read_ended(preempted)
    pair.round()
    finish(pair, "waits", 5, ticket_of(answers))


def test_a_prefix_is_read_once_for_all_that_begin_with_it() -> None:
    pair = pair_of()
    answers = [pair.reserve(name, prompt(0), lane_bytes_per_s=SLOW) for name in ("first", "second")]
    assert pair.below.host.reading_blocks == FULL // BLOCK
    pair.settle()
    pair.round()
    assert [ticket_of(each).cached_tokens for each in answers] == [FULL, FULL]
    assert pair.below.host.stats.hit_tokens == FULL
    for name in ("first", "second"):
        pair.start(name, prompt(0), ticket_of(answers[name == "second"]))
    pair.rounds(lambda: all(len(pair.tokens(name)) == MAX_TOKENS for name in ("first", "second")))
    pair.settle()
    pair.rounds(lambda: pair.consumer.status.in_progress == 0)
    pair.assert_empty()
    assert not pair.below._begun


@pytest.mark.parametrize("lane_bytes_per_s", [FAST, 0.0])
def test_a_fast_or_unknown_lane_s_are_not(lane_bytes_per_s: float) -> None:
    pair = pair_of()
    ticket = ticket_of(pair.reserve("again", prompt(0), lane_bytes_per_s=lane_bytes_per_s))
    assert ticket.cached_tokens == 0
    finish(pair, "again", 0, ticket)
    assert pair.below.host.stats.hit_tokens == 0


def test_what_is_in_the_pool_already_is_granted_at_once() -> None:
    pair = pair_of()
    ticket = ticket_of(pair.reserve("again", prompt(3), lane_bytes_per_s=SLOW))
    assert ticket.cached_tokens == FULL
    finish(pair, "again", 3, ticket)


def test_a_prompt_to_compute_here_and_a_prefix_are_no_handoffs() -> None:
    pair = pair_of()
    answers = pair.reserve("local", prompt(0), local_prefill_tokens=LENGTH, lane_bytes_per_s=SLOW)
    assert ticket_of(answers) is None
    pair.settle()
    pair.rounds(lambda: len(pair.tokens("local")) == MAX_TOKENS)
    pair.settle()
    whole = prompt(1)[:FULL]
    ticket = ticket_of(pair.reserve("prefix", whole, lane_bytes_per_s=SLOW, prefix_only=True))
    assert ticket.cached_tokens == 0


def test_damaged_blocks_are_transferred() -> None:
    pair = pair_of()
    store = pair.below.host.store
    slot = pair.below.host.index.slot_of(sorted_hashes(pair)[2])
    assert slot is not None
    store._bytes(slot)[7] ^= 1  # type: ignore[attr-defined]
    answers = pair.reserve("again", prompt(0), lane_bytes_per_s=SLOW)
    pair.settle()
    pair.round()
    ticket = ticket_of(answers)
    assert ticket.cached_tokens == 2 * BLOCK, "as far as the first one that is damaged"
    finish(pair, "again", 0, ticket)


def sorted_hashes(pair: TieredPair) -> list[bytes]:
    """Of the blocks of the first prompt, which came first."""
    return list(pair.below.host.index.hashes())


def test_an_abort_while_it_is_read_leaves_nothing() -> None:
    pair = pair_of()
    answers = pair.reserve("gone", prompt(0), lane_bytes_per_s=SLOW)
    assert pair.consumer.abort(pair.decode, f"{COORDINATOR}/gone", COORDINATOR, True, pair.clock.now)
    pair.settle()
    pair.round()
    assert answers == []
    pair.assert_empty()


def test_others_reserve_meanwhile_and_while_others_wait_nothing_is_read() -> None:
    pair = pair_of()
    answers = pair.reserve("read", prompt(0), lane_bytes_per_s=SLOW)
    other = ticket_of(pair.reserve("other", prompt(1)))
    waits = pair.reserve("waits", prompt(2))
    assert waits == []
    behind = pair.reserve("behind", prompt(1), lane_bytes_per_s=SLOW)
    assert pair.below.host.reading_blocks <= FULL // BLOCK, "only of the first"
    for name in ("waits", "behind"):
        pair.consumer.abort(pair.decode, f"{COORDINATOR}/{name}", COORDINATOR, True, pair.clock.now)
    pair.start("other", prompt(1), other)
    pair.rounds(lambda: len(pair.tokens("other")) == MAX_TOKENS)
    pair.settle()
    pair.rounds(lambda: bool(answers))
    finish(pair, "read", 0, ticket_of(answers))
    assert behind == []


def test_a_deadline_ends_the_wait_and_a_disk_that_hangs_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_tiers, "_LEAST_PATIENCE_S", 0.05)
    monkeypatch.setattr(kv_tiers, "_UNKNOWN_PATIENCE_S", 0.05)
    stores: list[FailingStore] = []

    def disk_of(block_bytes: int) -> BlockStore:
        stores.append(FailingStore(64, block_bytes))
        return stores[0]

    pair, (disk,) = pair_of(2, disk_of), stores
    disk.may_read.clear()
    late = pair.reserve("late", prompt(0), lane_bytes_per_s=SLOW, deadline_s=pair.clock.now + 1)
    assert late == []
    pair.clock.now += 2
    pair.round()
    assert isinstance(late[0], DeadlineExceededError)
    pair.settle(lambda: pair.below._late_reads == 1)
    ticket = ticket_of(pair.reserve("next", prompt(0), lane_bytes_per_s=SLOW))
    assert ticket.cached_tokens == 0
    disk.may_read.set()
    finish(pair, "next", 0, ticket)


@pytest.mark.parametrize("speed", [float("nan"), float("inf"), -1.0, 1e7])
def test_no_lane_is_so_fast(speed: float) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        _lane_bytes_per_s(decode_pb2.ReserveRequest(lane_gb_per_second=speed))
    assert caught.value.field == "lane_gb_per_second"


def test_a_lane_s_speed_in_bytes() -> None:
    assert _lane_bytes_per_s(decode_pb2.ReserveRequest(lane_gb_per_second=0.5)) == 5e8
    assert _lane_bytes_per_s(decode_pb2.ReserveRequest()) == 0
