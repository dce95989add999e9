"""An engine over tiers gives the tokens that it gives without, whatever the tiers do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kv_cache.cache_events import KvEventReader
from engine.runner.simulated_runner import expected_tokens
from engine.tiers.tier_read import TierRead
from splitserve.generation.kv_blocks import extend_block_hashes, name_of
from tests.support.engine.engine_rig import BLOCK, request
from tests.support.tiers.tiers_rig import FailingStore, TieredRig

POOL = 24
BYTES = BLOCK * 16
"""Of a simulated block."""


def prompt(number: int, length: int = 40) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(32, 127) for _ in range(length)]


def ask(rig: TieredRig, *numbers: int, length: int = 40, wait: bool = True) -> None:
    """Answers prompts, and checks every token."""
    for number in numbers:
        name, tokens = f"{number}-{len(rig.results)}", prompt(number, length)
        rig.core.add_request(request(name, tokens, max_tokens=3))
        rig.settle()
        assert rig.outputs[name].token_ids == expected_tokens(tokens, 3)
    rig.assert_clean()


_made: list[TieredRig] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().below.close()


def rig_of(
    host_blocks: int = 64, disk: Path | FailingStore | None = None, num_blocks: int = POOL
) -> TieredRig:
    _made.append(TieredRig(host_blocks, disk, num_blocks=num_blocks))
    return _made[-1]


def names_reported(rig: TieredRig) -> set[bytes]:
    reader, held = KvEventReader(rig.core.kv_events), set()
    while (events := reader.next_events()) is not None:
        for names in (events.stored, events.in_host, events.on_disk):
            held |= {names[at : at + 8] for at in range(0, len(names), 8)}
    return held


def hashes_of_prompt(number: int, blocks: int) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, prompt(number), BLOCK, b"", blocks)
    return hashes


def names_of(number: int, blocks: int) -> set[bytes]:
    return set(map(name_of, hashes_of_prompt(number, blocks)))


def test_a_working_set_of_twice_the_pool_is_read_back_from_host_memory() -> None:
    rig = rig_of()
    ask(rig, *range(5))
    assert rig.hits() == {"host": 0}
    ask(rig, *range(5))
    # All full blocks but the last one, whose last token must be computed.
    assert rig.hits() == {"host": 5 * 36}
    assert rig.below.host.stats.failures == {"write": 0, "read": 0, "skipped": 0}


def test_the_disk_has_them_after_a_restart(tmp_path: Path) -> None:
    rig = rig_of(disk=tmp_path)
    ask(rig, 0, 1)
    before = names_reported(rig)
    rig.core.close()
    again = rig_of(disk=tmp_path)
    assert names_reported(again) == before
    ask(again, 0, 1)
    assert again.hits() == {"host": 0, "disk": 2 * 36}
    again.core.close()


def test_a_small_host_tier_hands_on_to_the_disk(tmp_path: Path) -> None:
    rig = rig_of(host_blocks=12, disk=tmp_path)
    ask(rig, 0, 1, 2, 3, 0, 1, 2, 3)
    hits = rig.hits()
    assert hits["disk"] > 0
    assert sum(hits.values()) >= 3 * 36
    rig.core.close()


def test_salts_are_kept_apart() -> None:
    rig = rig_of()
    for salt in (b"a", b"b", b"c", b"d"):
        rig.core.add_request(request(salt.decode(), prompt(0), max_tokens=2, cache_salt=salt))
        rig.settle()
    assert rig.hits() == {"host": 0}
    rig.core.add_request(request("again", prompt(0), max_tokens=2, cache_salt=b"a"))
    rig.settle()
    assert rig.hits() == {"host": 36}


def test_coordinators_hear_of_a_block_until_no_tier_has_it() -> None:
    rig = rig_of(host_blocks=48)
    ask(rig, 0)
    assert names_of(0, 10) <= names_reported(rig)
    ask(rig, 1, 2, 3)
    assert rig.core.pool.lookup(hashes_of_prompt(0, 1)[0]) is None
    held = names_reported(rig)
    assert len(held) > POOL
    ask(rig, *range(4, 12))
    assert not names_of(0, 10) & names_reported(rig)


def places_reported(rig: TieredRig, number: int) -> list[str | None]:
    """Where the first full blocks of a prompt are, as coordinators hear."""
    places = rig.core.kv_events.snapshot()[0]
    return [places.get(name_of(block_hash)) for block_hash in hashes_of_prompt(number, 10)]


def test_coordinators_hear_where_a_block_is(tmp_path: Path) -> None:
    rig = rig_of(host_blocks=24, disk=tmp_path)
    ask(rig, 0)
    assert rig.core.kv_events.tiered
    assert places_reported(rig, 0) == ["pool"] * 10
    ask(rig, 1, 2)
    rig.core.pool.forget()
    found = places_reported(rig, 0)
    assert set(found) == {"host", "disk"}
    assert found == sorted(found, reverse=True), "host memory gives up a prefix from its end"
    assert rig.below.host.bytes_per_s > 0
    rig.core.add_request(request("again", prompt(0), max_tokens=3))
    rig.settle()
    assert places_reported(rig, 0)[:9] == ["pool"] * 9
    rig.core.close()
    again = rig_of(host_blocks=24, disk=tmp_path)
    assert places_reported(again, 1)[:9] == ["disk"] * 9, "that is where they are after a restart"
    again.core.close()


def test_what_can_be_reached_counts_as_cached() -> None:
    rig = rig_of()
    ask(rig, 0, 1, 2)
    assert rig.core.cached_tokens(request("r", prompt(0))) == 36


@pytest.mark.parametrize("fault", ["full", "unreadable", "flip"])
def test_a_broken_disk_costs_computing_only(fault: str) -> None:
    disk = FailingStore(64, BYTES)
    rig = rig_of(host_blocks=12, disk=disk)
    disk.full = fault == "full"
    ask(rig, 0, 1, 2, 3)
    disk.unreadable = fault == "unreadable"
    disk.flip = lambda slot: fault == "flip"
    ask(rig, 0, 1, 2, 3)
    failures = rig.below.all["disk"].stats.failures
    assert failures["write" if fault == "full" else "read"] > 0
    assert rig.hits()["disk"] == 0
    rig.core.close()


def test_damaged_host_memory_is_a_miss() -> None:
    rig = rig_of()
    ask(rig, 0, 1, 2)
    store = rig.below.host.store
    for slot in range(store.slots):
        store._bytes(slot)[7] ^= 1  # type: ignore[attr-defined]
    ask(rig, 0, 1)
    assert rig.hits() == {"host": 0}
    assert rig.below.host.stats.failures["read"] == 2


def slow_rig() -> tuple[TieredRig, FailingStore]:
    """With full tiers, of which the disk does not answer."""
    disk = FailingStore(64, BYTES)
    rig = rig_of(host_blocks=2, disk=disk)
    ask(rig, 0, 1, 2, 3)
    disk.may_read.clear()
    return rig, disk


def end_clean(rig: TieredRig, disk: FailingStore) -> None:
    """Lets the disk answer: nothing is left of what waited for it."""
    disk.may_read.set()
    rig.settle()
    rig.assert_clean()
    rig.core.close()


def test_a_prompt_that_is_given_up_while_it_waits_leaves_nothing() -> None:
    rig, disk = slow_rig()
    rig.core.add_request(request("gone", prompt(0), max_tokens=3))
    assert rig.core.load().referenced_blocks > 0
    assert rig.core.abort("gone")
    end_clean(rig, disk)
    assert "gone" not in rig.outputs


def test_a_deadline_ends_the_wait() -> None:
    rig, disk = slow_rig()
    rig.core.add_request(request("late", prompt(0), max_tokens=3, deadline_s=rig.clock.now + 1))
    rig.clock.now += 2
    rig.run()
    assert rig.outputs["late"].failure is not None
    end_clean(rig, disk)


def test_a_disk_that_does_not_answer_is_waited_for_once() -> None:
    rig, disk = slow_rig()
    for name in ("patient", "next"):
        rig.core.add_request(request(name, prompt(0), max_tokens=3))
        if name == "patient":
            rig.alarms.advance(60)
        rig.settle(busy=lambda name=name: name not in rig.outputs)  # type: ignore[misc]
        assert rig.outputs[name].token_ids == expected_tokens(prompt(0), 3)
        assert rig.below._late_reads == 1
        assert rig.core.load().referenced_blocks == 0, "the disk keeps no block of the pool"
    disk.may_read.set()
    rig.settle()
    assert rig.hits()["disk"] == 0, "by then the blocks are others'"
    assert rig.below._late_reads == rig.below.all["disk"].stats.failures["read"] == 0
    end_clean(rig, disk)


def test_a_read_that_is_given_up_writes_to_no_block() -> None:
    rig = rig_of()
    rig.core.close()
    pool_bytes, content = rig.below._copier, memoryview(bytearray(b"x" * BYTES))
    read = TierRead([], [], [], [])
    assert read.load(pool_bytes, 0, content)
    read.give_up()
    assert not read.load(pool_bytes, 1, content)
    found = [bytearray(BYTES), bytearray(BYTES)]
    for block, into in enumerate(found):
        pool_bytes.save(block, memoryview(into))
    assert (found[0] == content, found[1] == content) == (True, False)


def test_without_a_thread_to_end_the_wait_nothing_is_read_from_a_disk() -> None:
    rig, disk = slow_rig()
    rig.alarms.refuses = True
    ask(rig, 0)
    assert rig.hits()["disk"] == 0
    end_clean(rig, disk)


def test_the_engine_can_close_in_the_middle() -> None:
    rig, disk = slow_rig()
    rig.core.add_request(request("r", prompt(0), max_tokens=3))
    disk.may_read.set()
    rig.core.close()


def test_many_prompts_at_once() -> None:
    rig = rig_of(128, num_blocks=64)
    for round_ in range(3):
        for number in range(12):
            rig.core.add_request(request(f"{round_}-{number}", prompt(number), max_tokens=3))
        rig.settle()
        for number in range(12):
            assert rig.outputs[f"{round_}-{number}"].token_ids == expected_tokens(prompt(number), 3)
    rig.assert_clean()
    assert rig.hits()["host"] > 0


def test_a_prefix_is_held_for_a_peer_once_a_tier_has_brought_it() -> None:
    rig = rig_of()
    ask(rig, *range(5))
    hashes = hashes_of_prompt(0, 10)
    assert rig.core.pool.lookup(hashes[0]) is None, "the pool has others by now"
    held: list[list[int]] = []
    wanted = request("fetch", prompt(0), max_tokens=1, prefill_only=True, prefix_only=True)
    rig.core.hold_prefix(wanted, held.append)
    assert held == []
    rig.settle()
    assert held == [[rig.core.pool.lookup(block_hash) for block_hash in hashes]]
    assert rig.core.load().referenced_blocks == 10
    assert rig.core.release_held("fetch")
    rig.assert_clean()


def test_a_prefix_that_is_aborted_on_its_way_up_is_held_for_nobody() -> None:
    rig = rig_of()
    ask(rig, *range(5))
    held: list[list[int]] = []
    wanted = request("fetch", prompt(0), max_tokens=1, prefill_only=True, prefix_only=True)
    rig.core.hold_prefix(wanted, held.append)
    assert rig.core.abort("fetch")
    rig.core.release_held("fetch")
    rig.settle()
    assert held == []
    rig.assert_clean()
