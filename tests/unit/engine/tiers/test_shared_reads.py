"""Prompts that begin alike and come together read what tiers have of them once, and none depends on another."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from engine.pacing.step_time_fit import PromptFit
from engine.runner.simulated_runner import expected_tokens
from engine.tiers.read_choice import (
    PrefixBelow,
    ReadRate,
    TierName,
    waits_for_read,
    waits_in_place_of_transfer,
)
from splitserve.generation.kv_blocks import extend_block_hashes
from tests.support.engine.engine_rig import BLOCK, request
from tests.support.tiers.tiers_rig import FailingStore, TieredRig

BLOCK_BYTES = BLOCK * 16
LENGTH, FULL = 40, 9
"""Tokens of a prompt, and the blocks of it that can be cached."""
PROMPT = random.Random(0).choices(range(32, 127), k=LENGTH)


@pytest.fixture
def disk() -> FailingStore:
    return FailingStore(64, BLOCK_BYTES)


@pytest.fixture
def rig(disk: FailingStore) -> Iterator[TieredRig]:
    """The prompt is on a disk that does not answer until it may, and nowhere else."""
    rig = TieredRig(16, disk, num_blocks=48)
    ask(rig, "first")
    rig.settle()
    for block_hash in list(rig.below.host.index.hashes()):
        rig.below.host.index.drop(block_hash)
    rig.core.pool.forget()
    disk.may_read.clear()
    yield rig
    rig.core.close()


def blocks_read(rig: TieredRig) -> int:
    return sum(tier.stats.read_bytes for tier in rig.below.all.values()) // BLOCK_BYTES


def ask(rig: TieredRig, name: str, length: int = LENGTH, **fields: object) -> None:
    rig.core.add_request(request(name, PROMPT[:length], max_tokens=3, **fields))


def assert_answered(rig: TieredRig, *names: str, length: int = LENGTH) -> None:
    """With every token, and nothing is left."""
    for name in names:
        assert rig.outputs[name].token_ids == expected_tokens(PROMPT[:length], 3)
    rig.assert_clean()
    assert not rig.below._begun
    assert not any(tier.reading_blocks for tier in rig.below.all.values())


def test_equal_prompts_that_come_together_are_read_once(rig: TieredRig, disk: FailingStore) -> None:
    for name in "abc":
        ask(rig, name)
    assert rig.core.load().referenced_blocks == FULL, "of the one read"
    disk.may_read.set()
    while not rig.core.has_work():
        rig.woken.wait(0.05)
        rig.woken.clear()
        rig.below.collect()
    rig.core.begin_step()
    tables = [rig.core._live[name].block_ids[:FULL] for name in "abc"]
    assert tables == 3 * tables[:1]
    assert all(rig.core.pool.owners(block)[0] >= 3 for block in tables[0])
    rig.core.finish_step()
    rig.settle()
    assert_answered(rig, *"abc")
    assert blocks_read(rig) == FULL
    assert rig.hits()["disk"] == FULL * BLOCK


def test_a_longer_prompt_reads_on_and_a_shorter_one_takes_its_part(
    rig: TieredRig, disk: FailingStore
) -> None:
    for length in (20, LENGTH, LENGTH, 12):
        ask(rig, f"{length}-{len(rig.core._live)}", length)
    disk.may_read.set()
    rig.settle()
    assert blocks_read(rig) == FULL, "each of them once"
    for index, length in enumerate((20, LENGTH, LENGTH, 12)):
        assert_answered(rig, f"{length}-{index}", length=length)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_an_abort_of_one_is_no_matter_to_the_other(rig: TieredRig, disk: FailingStore, gone: str) -> None:
    ask(rig, "a")
    ask(rig, "b")
    assert rig.core.abort(gone)
    disk.may_read.set()
    rig.settle()
    assert_answered(rig, "b" if gone == "a" else "a")
    assert gone not in rig.outputs
    assert blocks_read(rig) == FULL


def test_all_may_be_aborted(rig: TieredRig, disk: FailingStore) -> None:
    ask(rig, "a", 20)
    ask(rig, "b")
    assert rig.core.abort("a")
    assert rig.core.abort("b")
    disk.may_read.set()
    rig.settle()
    assert_answered(rig)
    assert blocks_read(rig) == 4, "nothing is read on for those that have gone"


def test_a_deadline_of_one_is_no_matter_to_the_other(rig: TieredRig, disk: FailingStore) -> None:
    ask(rig, "late", deadline_s=rig.clock.now + 1)
    ask(rig, "patient")
    rig.clock.now += 2
    rig.run()
    assert rig.outputs["late"].failure is not None
    disk.may_read.set()
    rig.settle()
    assert_answered(rig, "patient")
    assert blocks_read(rig) == FULL


def test_damaged_blocks_are_computed_by_all(rig: TieredRig, disk: FailingStore) -> None:
    damaged = iter([False, False, True])
    disk.flip = lambda slot: next(damaged, False)
    ask(rig, "a")
    ask(rig, "b")
    disk.may_read.set()
    rig.settle()
    assert_answered(rig, "a", "b")
    assert blocks_read(rig) == 2


def test_an_unreadable_disk_costs_each_its_computing(rig: TieredRig, disk: FailingStore) -> None:
    disk.unreadable = True
    ask(rig, "a")
    ask(rig, "b")
    disk.may_read.set()
    rig.settle()
    assert_answered(rig, "a", "b")
    assert blocks_read(rig) == 0


def test_a_disk_that_hangs_is_waited_for_once_by_all(rig: TieredRig, disk: FailingStore) -> None:
    for name in "ab":
        ask(rig, name)
    rig.alarms.advance(60)
    rig.settle(busy=lambda: len(rig.outputs) < 3)
    assert rig.below._late_reads == 1
    ask(rig, "c")
    rig.run()
    disk.may_read.set()
    rig.settle()
    assert_answered(rig, *"abc")
    assert rig.below._late_reads == 0


def test_a_short_prompt_waits_no_longer_than_computing_it_takes(rig: TieredRig, disk: FailingStore) -> None:
    rig.below._prompt_fit = lambda: PromptFit(0.0, 0.01, 100.0)  # hours, but for the shortest
    ask(rig, "long")
    rig.below._prompt_fit = lambda: PromptFit(0.0, 0.01, 0.0)
    ask(rig, "short", 12)
    rig.alarms.advance(1)
    rig.settle(busy=lambda: "short" not in rig.outputs)
    assert "long" not in rig.outputs
    assert rig.below._late_reads == 0, "the other waits on"
    disk.may_read.set()
    rig.settle()
    assert_answered(rig, "long")
    assert_answered(rig, "short", length=12)
    assert blocks_read(rig) == FULL


def test_who_cannot_have_an_alarm_is_computed(rig: TieredRig, disk: FailingStore) -> None:
    rig.below._prompt_fit = lambda: PromptFit(0.0, 0.01, 100.0)
    ask(rig, "long")
    rig.below._prompt_fit = lambda: PromptFit(0.0, 0.01, 0.0)
    rig.alarms.refuses = True
    ask(rig, "short", 12)
    rig.run()
    assert rig.outputs["short"].token_ids == expected_tokens(PROMPT[:12], 3)
    disk.may_read.set()
    rig.settle()
    assert_answered(rig, "long")


def hold(rig: TieredRig, name: str, blocks: int) -> list[list[int]]:
    """Asks for a prefix to be sent; what is held of it, once it is known."""
    held: list[list[int]] = []
    tokens = PROMPT[: blocks * BLOCK]
    wanted = request(name, tokens, max_tokens=1, prefill_only=True, prefix_only=True)
    rig.core.hold_prefix(wanted, held.append)
    return held


def test_a_prefix_that_a_peer_wants_is_read_whole_whatever_computing_takes(
    rig: TieredRig, disk: FailingStore
) -> None:
    """The coordinator has compared; nothing is computed here."""
    rig.below._prompt_fit = lambda: PromptFit(0.0, 1e-12, 0.0)
    disk.may_read.set()
    held = hold(rig, "fetch", FULL)
    rig.settle()
    assert [len(blocks) for blocks in held] == [FULL]
    assert rig.core.release_held("fetch")
    rig.assert_clean()


def test_a_prefix_without_room_is_not_read_in_part(disk: FailingStore, rig: TieredRig) -> None:
    disk.may_read.set()
    rig.core.add_request(request("big", [40] * 160, max_tokens=3))  # leaves 8 blocks
    rig.core.step()
    held = hold(rig, "fetch", FULL)
    assert held == [[]]
    assert rig.core.release_held("fetch")
    rig.settle()
    assert blocks_read(rig) == 0
    rig.assert_clean()


def test_a_prefix_with_a_gap_is_not_read_in_part(rig: TieredRig, disk: FailingStore) -> None:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, PROMPT, BLOCK, b"", FULL)
    rig.below.disk.index.drop(hashes[FULL - 2])  # type: ignore[union-attr]
    assert hold(rig, "fetch", FULL) == [[]]
    assert rig.core.release_held("fetch")
    ask(rig, "a")
    assert hold(rig, "beside a read", FULL) == [[]], "which brings less"
    assert rig.core.release_held("beside a read")
    disk.may_read.set()
    rig.settle()
    assert_answered(rig, "a")
    assert blocks_read(rig) == FULL - 2


def test_prefixes_and_prompts_wait_for_one_read(rig: TieredRig, disk: FailingStore) -> None:
    ask(rig, "a")
    held = hold(rig, "fetch", FULL)
    other = hold(rig, "aborted", 5)
    assert rig.core.abort("aborted")
    assert rig.core.release_held("aborted")
    disk.may_read.set()
    rig.settle()
    assert [len(blocks) for blocks in held] == [FULL]
    assert other == []
    assert rig.core.release_held("fetch")
    assert_answered(rig, "a")
    assert blocks_read(rig) == FULL


def waits(
    tiers: list[TierName], shared: int, left_s: float, disk_s: float = 0.01, disk_wait_s: float = 0.0
) -> bool:
    rates: dict[TierName, ReadRate] = {"host": ReadRate(0.001), "disk": ReadRate(disk_s)}
    prefix = PrefixBelow(tokens=400, block_tokens=16, pool_blocks=2, tiers=tiers)
    fit = PromptFit(0.01, 0.001, 0.0)  # a block takes 16 ms to compute
    return waits_for_read(prefix, rates, {"disk": disk_wait_s}, fit, shared, left_s)


def test_a_read_is_waited_for_while_that_is_sooner() -> None:
    assert waits(["disk"] * 10, 10, 0.1, disk_wait_s=0.1), "its own would come after it"
    assert waits([], 10, 0.15), "there is no room for another one"
    assert not waits([], 10, 0.17), "computing them takes 0.16 s"
    assert not waits(["host"] * 10, 10, 0.1), "its own is there in 0.01 s"


def test_a_transfer_is_preferred_to_a_long_read_of_which_little_is_needed() -> None:
    rates: dict[TierName, ReadRate] = {"disk": ReadRate(0.01)}

    def waits_beside(shared: int, left_s: float) -> bool:
        return waits_in_place_of_transfer(["disk"] * 10, rates, {"disk": left_s}, 0.02, shared, left_s)

    assert waits_beside(10, 0.1), "0.2 s by the lane"
    assert not waits_beside(10, 0.21)
    assert not waits_beside(1, 0.1)
    assert waits_in_place_of_transfer([], rates, {}, 0.02, 10, 0.1), "there is no room for another one"


def test_what_is_read_afterwards_counts() -> None:
    assert waits(["disk"] * 20, 2, 0.02, disk_wait_s=0.02), "0.2 s, and 0.22 s without"
    assert not waits(["host"] * 20, 2, 0.3)


def test_without_a_measure_of_computing_all_wait() -> None:
    assert waits_for_read(PrefixBelow(100, 16, 0, ["host"]), {}, {}, None, 1, 1e9)
