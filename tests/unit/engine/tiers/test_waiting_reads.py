"""Prompts that wait for a read count as waiting, and their reads yield to streams that come before them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from engine.core.precedence import Precedence
from engine.runner.simulated_runner import expected_tokens
from splitserve.errors import ResourceExhaustedError
from tests.support.engine.engine_rig import BLOCK, request
from tests.support.tiers.tiers_rig import FailingStore, TieredRig

BLOCK_BYTES = BLOCK * 16
LENGTH = 40
HIGH, LOW = Precedence(class_rank=1), Precedence(class_rank=0)
Make = Callable[..., tuple[TieredRig, FailingStore]]


def prompt(name: str, length: int = LENGTH) -> list[int]:
    return random.Random(name).choices(range(32, 127), k=length)


@pytest.fixture
def slow_rig() -> Iterator[Make]:
    """Makes rigs with a prompt on a disk that does not answer until it may, and nowhere else."""
    made: list[TieredRig] = []

    def make(num_blocks: int, **overrides: int | bool) -> tuple[TieredRig, FailingStore]:
        disk = FailingStore(128, BLOCK_BYTES)
        rig = TieredRig(64, disk, 128, num_blocks, **overrides)
        made.append(rig)
        ask(rig, "prompt", tokens=prompt("prompt"), max_tokens=3)
        rig.settle()
        only_on_disk(rig)
        rig.core.pool.forget()
        disk.may_read.clear()
        return rig, disk

    yield make
    for rig in made:
        rig.core.close()


def only_on_disk(rig: TieredRig) -> None:
    for block_hash in list(rig.below.host.index.hashes()):
        rig.below.host.index.drop(block_hash)


def ask(rig: TieredRig, name: str, *, tokens: list[int], max_tokens: int, **fields: object) -> None:
    rig.core.add_request(request(name, tokens, max_tokens=max_tokens, **fields))


def test_prompts_that_wait_for_a_read_are_load_and_have_the_limit(slow_rig: Make) -> None:
    rig, disk = slow_rig(48, max_waiting_requests=4)
    lengths = [LENGTH, 20, 20, 20]
    for number, length in enumerate(lengths):
        ask(rig, f"{number}", tokens=prompt("prompt")[:length], max_tokens=3)
    load = rig.core.load()
    assert (load.waiting_requests, load.waiting_tokens) == (4, sum(lengths))
    with pytest.raises(ResourceExhaustedError) as caught:
        ask(rig, "more", tokens=prompt("prompt")[:20], max_tokens=3)
    assert caught.value.reason == "QUEUE_FULL"
    with pytest.raises(ResourceExhaustedError):
        ask(rig, "other", tokens=prompt("other"), max_tokens=3)
    assert rig.core.abort("1")
    load = rig.core.load()
    assert (load.waiting_requests, load.waiting_tokens) == (3, sum(lengths) - 20)
    disk.may_read.set()
    rig.settle()
    for number in (0, 2, 3):
        assert rig.outputs[f"{number}"].token_ids == expected_tokens(prompt("prompt")[: lengths[number]], 3)
    rig.assert_clean()


def test_a_read_of_a_lower_class_yields_to_a_stream(slow_rig: Make) -> None:
    rig, disk = slow_rig(24)
    ask(rig, "high", tokens=prompt("high", 8), max_tokens=80, precedence=HIGH)
    rig.step()
    ask(rig, "low", tokens=prompt("prompt"), max_tokens=3, precedence=LOW)
    assert rig.below._reading
    until(rig, lambda: "low" in rig.outputs or not rig.core.has_work())
    assert rig.outputs["high"].finish_reason is not None
    disk.may_read.set()
    rig.settle()
    assert rig.outputs["high"].token_ids == expected_tokens(prompt("high", 8), 80)
    assert rig.outputs["low"].token_ids == expected_tokens(prompt("prompt"), 3)
    rig.assert_clean()
    assert rig.below._late_reads == 0


def test_the_read_of_a_preempted_sequence_yields_to_a_stream(slow_rig: Make) -> None:
    rig, disk = slow_rig(24)
    ask(rig, "low", tokens=prompt("low", 30), max_tokens=40, precedence=LOW)
    ask(rig, "other", tokens=prompt("other", 30), max_tokens=24, precedence=HIGH)
    ask(rig, "high", tokens=prompt("high", 8), max_tokens=80, precedence=HIGH)
    while not rig.below._reading:
        rig.step()
        if not rig.below._reading:
            while len(rig.below.disk.thread):  # type: ignore[union-attr]
                rig.woken.wait(0.01)
            rig.below.collect()
            only_on_disk(rig)
    assert not rig.core._live["low"].block_ids
    until(rig, lambda: not rig.core.has_work())
    assert rig.outputs["high"].token_ids == expected_tokens(prompt("high", 8), 80)
    disk.may_read.set()
    rig.settle()
    assert rig.outputs["low"].token_ids == expected_tokens(prompt("low", 30), 40)
    rig.assert_clean()


def test_a_read_of_a_higher_class_stays(slow_rig: Make) -> None:
    rig, disk = slow_rig(24)
    ask(rig, "low", tokens=prompt("low", 8), max_tokens=80, precedence=LOW)
    rig.step()
    ask(rig, "high", tokens=prompt("prompt"), max_tokens=3, precedence=HIGH)
    until(rig, lambda: not rig.core._live["low"].block_ids)
    assert rig.below._reading
    disk.may_read.set()
    rig.settle()
    assert rig.hits()["disk"] > 0
    assert rig.outputs["low"].token_ids == expected_tokens(prompt("low", 8), 80)
    rig.assert_clean()


def test_a_read_that_a_peer_waits_for_stays(slow_rig: Make) -> None:
    rig, disk = slow_rig(24)
    ask(rig, "stream", tokens=prompt("stream", 8), max_tokens=80, precedence=HIGH)
    rig.step()
    held: list[list[int]] = []
    wanted = request("peer", prompt("prompt")[:36], max_tokens=1, prefill_only=True, prefix_only=True)
    rig.core.hold_prefix(wanted, held.append)
    assert rig.core.load().waiting_requests == 0, "nothing is computed for it"
    until(rig, lambda: not rig.core._live["stream"].block_ids)
    assert held == []
    disk.may_read.set()
    rig.settle(busy=lambda: not held)
    assert len(held[0]) == 9
    assert rig.core.release_held("peer")
    rig.settle()
    rig.assert_clean()


def test_the_blocks_before_a_read_count_in_its_share_of_the_pool(slow_rig: Make) -> None:
    rig, disk = slow_rig(16)
    disk.may_read.set()
    ask(rig, "start", tokens=prompt("prompt")[:28], max_tokens=1)
    rig.settle()
    only_on_disk(rig)
    disk.may_read.clear()
    ask(rig, "whole", tokens=prompt("prompt"), max_tokens=3)
    assert 0 < rig.core.load().referenced_blocks <= 8
    disk.may_read.set()
    rig.settle()
    assert rig.outputs["whole"].token_ids == expected_tokens(prompt("prompt"), 3)
    rig.assert_clean()


def until(rig: TieredRig, is_so: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_so():
            return
        rig.step()
    raise AssertionError("it does not come about")
