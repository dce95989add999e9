"""A prompt finds what other workers have written into a store that they share; and none waits long for an answer."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from engine.runner.simulated_runner import expected_tokens
from engine.tiers import kv_tiers, tier_read
from engine.tiers.look_ups import LATE_S, MOST_WAITING, PATIENCE_S
from splitserve.errors import ResourceExhaustedError
from splitserve.generation.kv_blocks import extend_block_hashes
from tests.support.engine.engine_rig import BLOCK, request
from tests.support.tiers.shared_rig import FakeMooncake
from tests.support.tiers.tiers_rig import TieredRig
from tests.support.waiting import PATIENCE_S as WAIT_S

BLOCK_BYTES = BLOCK * 16
LENGTH, FULL = 40, 9
"""Tokens of a prompt, and the blocks of it that can be cached."""
PROMPT = random.Random(0).choices(range(32, 127), k=LENGTH)

Start = Callable[..., TieredRig]


@pytest.fixture
def fake() -> FakeMooncake:
    return FakeMooncake()


@pytest.fixture
def start(fake: FakeMooncake) -> Iterator[Start]:
    """Starts a worker over the store."""
    rigs = []

    def begin(slots: int = 64, identity: bytes = bytes(32)) -> TieredRig:
        rigs.append(TieredRig(64, fake.store(BLOCK_BYTES, slots, identity), num_blocks=48))
        return rigs[-1]

    yield begin
    fake.may_answer.set()
    for rig in rigs:
        rig.core.close()


@pytest.fixture
def rig(fake: FakeMooncake, start: Start) -> TieredRig:
    """A worker that knows nothing of the prompt that another one has computed."""
    one = start()
    ask(one, "first")
    one.settle()
    assert fake.writes == FULL + 1, "and the block of the answer"
    fake.questions.clear()
    return start()


def ask(rig: TieredRig, name: str, tokens: list[int] = PROMPT, **fields: object) -> None:
    rig.core.add_request(request(name, tokens, max_tokens=3, **fields))


def found(rig: TieredRig) -> int:
    return rig.below.all["disk"].stats.found_blocks


def assert_answered(rig: TieredRig, *names: str, tokens: list[int] = PROMPT) -> None:
    """With every token, and nothing is left."""
    for name in names:
        assert rig.outputs[name].token_ids == expected_tokens(tokens, 3)
    rig.assert_clean()
    assert rig.below.look_ups is not None
    assert not rig.below.look_ups.busy


def test_what_another_worker_has_computed_is_read(rig: TieredRig, fake: FakeMooncake) -> None:
    ask(rig, "a")
    assert "a" not in rig.outputs
    assert rig.core.load().waiting_requests == 1
    rig.settle()
    assert_answered(rig, "a")
    assert rig.hits() == {"host": 0, "disk": FULL * BLOCK}
    assert found(rig) == FULL
    assert fake.questions[0] == 8
    assert fake.writes == FULL + 1, "nothing is written twice"


def test_a_new_prompt_costs_one_small_question(rig: TieredRig, fake: FakeMooncake) -> None:
    tokens = [33] * 120
    ask(rig, "new", tokens)
    rig.settle()
    assert_answered(rig, "new", tokens=tokens)
    assert fake.questions[0] == 8
    assert found(rig) == 0


def test_what_is_known_is_not_asked_again(rig: TieredRig, fake: FakeMooncake) -> None:
    for name in "ab":
        ask(rig, name)
        rig.settle()
    asked = len(fake.questions)
    ask(rig, "c", PROMPT[: FULL * BLOCK + 1])
    rig.settle()
    assert_answered(rig, "a", "b")
    assert asked == len(fake.questions)
    assert fake.questions[:2] == [8, 1]


def test_a_longer_prompt_asks_for_its_rest(start: Start, fake: FakeMooncake) -> None:
    one, longer = start(), PROMPT + [50] * 120
    ask(one, "first", longer)
    one.settle()
    rig = start()
    ask(rig, "begin")
    rig.settle()
    fake.questions.clear()
    rig.below._prompt_fit = lambda: None
    ask(rig, "a", longer)
    rig.settle()
    assert_answered(rig, "a", tokens=longer)
    assert fake.questions[:2] == [8, 21], "from the first block that it does not know"


@pytest.mark.parametrize(
    ("identity", "salt"), [(b"?" * 32, b""), (bytes(32), b"another tenant")], ids=["identity", "salt"]
)
def test_another_model_or_salt_finds_nothing(
    rig: TieredRig, start: Start, fake: FakeMooncake, identity: bytes, salt: bytes
) -> None:
    other = start(identity=identity)
    ask(other, "a", cache_salt=salt)
    other.settle()
    assert_answered(other, "a")
    assert found(other) == 0
    assert other.hits()["disk"] == 0


def test_a_block_that_goes_after_the_look_up_is_computed(rig: TieredRig, fake: FakeMooncake) -> None:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, PROMPT, BLOCK, b"", FULL)
    disk = rig.below.all["disk"]
    read = disk.store.read

    def gone(slot: int, block_hash: bytes) -> memoryview | None:
        fake.objects.pop(next((key for key in fake.objects if key.endswith(hashes[4].hex())), ""), None)
        return read(slot, block_hash)

    disk.store.read = gone  # type: ignore[method-assign]
    ask(rig, "a")
    rig.settle()
    assert_answered(rig, "a")
    assert rig.hits()["disk"] == 4 * BLOCK
    assert disk.stats.failures["read"] == 1
    assert any(key.endswith(hashes[4].hex()) for key in fake.objects), "it is written again"


def test_a_store_that_hangs_costs_one_prompt_its_patience(rig: TieredRig, fake: FakeMooncake) -> None:
    fake.may_answer.clear()
    ask(rig, "late")
    rig.alarms.advance(PATIENCE_S)
    rig.settle(busy=lambda: "late" not in rig.outputs)
    ask(rig, "next", [60] * LENGTH)
    rig.run()
    assert rig.outputs["next"].token_ids == expected_tokens([60] * LENGTH, 3), "nobody else waits"
    fake.may_answer.set()
    rig.settle()
    asked = fake.questions.count(8)
    ask(rig, "then", [61] * LENGTH)
    rig.settle()
    assert fake.questions.count(8) == asked + 1, "it is asked again once it has answered"
    assert_answered(rig, "late")


def test_a_late_answer_helps_the_next_prompt(rig: TieredRig, fake: FakeMooncake) -> None:
    fake.may_answer.clear()
    ask(rig, "late")
    rig.alarms.advance(PATIENCE_S)
    rig.below.collect()
    assert rig.core.abort("late")
    fake.may_answer.set()
    rig.settle()
    assert (found(rig), fake.questions) == (FULL, [8, 1])
    ask(rig, "next")
    rig.settle()
    assert_answered(rig, "next")
    assert rig.hits()["disk"] == FULL * BLOCK
    assert fake.questions.count(8) == 1


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_prompt_that_ends_while_it_waits_leaves_nothing(
    rig: TieredRig, fake: FakeMooncake, how: str
) -> None:
    fake.may_answer.clear()
    if how == "abort":
        ask(rig, "a")
        assert rig.core.abort("a")
    else:
        ask(rig, "a", deadline_s=rig.clock() + 1)
        rig.clock.now += 2
        rig.run()
    rig.assert_clean()
    fake.may_answer.set()
    rig.settle()
    assert rig.hits()["disk"] == 0
    rig.assert_clean()


def test_a_store_that_fails_is_not_there(rig: TieredRig, fake: FakeMooncake) -> None:
    fake.fails = True
    for name in "ab":
        ask(rig, name)
        rig.settle()
    assert_answered(rig, "a", "b")
    assert found(rig) == 0


def test_prompts_that_wait_for_answers_are_bounded(rig: TieredRig, fake: FakeMooncake) -> None:
    fake.may_answer.clear()
    for count in range(MOST_WAITING + 5):
        ask(rig, str(count), [33 + count] * 9)
    assert len(rig.core._scheduler.waiting) == 5
    fake.may_answer.set()
    rig.settle()
    assert len(rig.outputs) == MOST_WAITING + 5
    rig.assert_clean()


def test_who_cannot_have_an_alarm_does_not_ask(rig: TieredRig, fake: FakeMooncake) -> None:
    rig.alarms.refuses = True
    ask(rig, "a")
    assert rig.run()["a"].token_ids == expected_tokens(PROMPT, 3)
    assert 8 not in fake.questions


def test_books_that_are_small_take_what_they_can(rig: TieredRig, start: Start) -> None:
    small = start(slots=3)
    ask(small, "a")
    small.settle()
    assert_answered(small, "a")
    assert small.hits()["disk"] == 3 * BLOCK
    assert len(small.below.all["disk"].index) == 3


def test_coordinators_hear_of_what_was_found(rig: TieredRig) -> None:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, PROMPT, BLOCK, b"", FULL)
    rig.below._prompt_fit = lambda: None
    ask(rig, "a")
    rig.settle(busy=lambda: not found(rig))
    names, _ = rig.core.kv_events.snapshot()
    assert {names[each[:8]] for each in hashes} <= {"disk", "pool"}
    rig.settle()


def test_a_peer_that_fetches_gets_what_the_store_has(rig: TieredRig) -> None:
    held: list[list[int]] = []
    tokens = PROMPT[: FULL * BLOCK]
    rig.core.hold_prefix(
        request("fetch", tokens, max_tokens=1, prefill_only=True, prefix_only=True), held.append
    )
    assert not held
    rig.settle()
    assert [len(blocks) for blocks in held] == [FULL]
    assert rig.core.release_held("fetch")
    rig.assert_clean()


def test_a_peer_that_is_refused_after_its_look_up_is_told_why(
    rig: TieredRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_read, "MOST_PEER_READS", 0)
    held: list[object] = []
    tokens = PROMPT[: FULL * BLOCK]
    rig.core.hold_prefix(
        request("fetch", tokens, max_tokens=1, prefill_only=True, prefix_only=True), held.append
    )
    rig.settle()
    (refusal,) = held
    assert isinstance(refusal, ResourceExhaustedError)
    assert refusal.reason == "PREFIX_READS_FULL"
    assert rig.core.release_held("fetch")
    rig.assert_clean()


def test_a_store_that_takes_no_blocks_is_not_named_until_it_does_again(
    rig: TieredRig, fake: FakeMooncake
) -> None:
    assert rig.below.shared_id == rig.below.all["disk"].store.shared_id  # type: ignore[attr-defined]
    fake.fails = True
    ask(rig, "lost", [33] * LENGTH)
    rig.settle()
    assert rig.below.all["disk"].stats.failures["write"] > 0
    assert rig.below.shared_id == 0
    fake.fails = False
    ask(rig, "few", [34] * 20)
    rig.settle()
    assert rig.below.shared_id == 0
    ask(rig, "many", [35] * 120)
    rig.settle()
    assert rig.below.shared_id != 0


def test_one_block_that_is_not_written_is_no_matter(rig: TieredRig) -> None:
    rig.below.all["disk"].skipped()
    assert rig.below.shared_id != 0


def test_a_store_that_does_not_answer_is_not_named(rig: TieredRig, fake: FakeMooncake) -> None:
    fake.may_answer.clear()
    ask(rig, "late")
    rig.alarms.advance(PATIENCE_S)
    rig.below.collect()
    assert rig.below.shared_id != 0, "a moment is no matter"
    rig.alarms.advance(LATE_S + 0.01)
    assert rig.below.shared_id == 0
    fake.may_answer.set()
    rig.settle()
    assert rig.below.shared_id != 0
    assert_answered(rig, "late")


def test_nor_is_one_whose_reads_are_late(rig: TieredRig) -> None:
    disk, may_read = rig.below.all["disk"], threading.Event()
    read = disk.store.read

    def hangs(slot: int, block_hash: bytes) -> memoryview | None:
        may_read.wait(WAIT_S)
        return read(slot, block_hash)

    disk.store.read = hangs  # type: ignore[method-assign]
    ask(rig, "late")
    rig.settle(busy=lambda: not rig.below.under_way)
    rig.alarms.advance(60)
    rig.below.collect()
    assert rig.below.shared_id == 0
    may_read.set()
    rig.settle()
    assert rig.below.shared_id != 0
    assert_answered(rig, "late")


@pytest.mark.parametrize("hangs", [False, True])
def test_a_store_is_not_closed_while_it_is_asked(
    rig: TieredRig,
    fake: FakeMooncake,
    hangs: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kv_tiers, "_CLOSE_S", 0.05 if hangs else WAIT_S)
    if hangs:
        fake.may_answer.clear()
        fake.asked.clear()
        ask(rig, "late")
        assert fake.asked.wait(WAIT_S)
    with caplog.at_level("INFO", "splitserve"):
        rig.below.close()
    assert fake.closes == (not hangs)
    assert [record.getMessage() for record in caplog.records] == ["kv_tier.hung"] * hangs
