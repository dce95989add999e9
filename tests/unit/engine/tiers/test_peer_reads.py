"""Peers that fetch prefixes have so many read at a time, and no more; prompts are read for all the same."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from engine.runner.simulated_runner import expected_tokens
from engine.tiers.tier_read import MOST_PEER_READS
from splitserve.errors import ResourceExhaustedError
from tests.support.engine.engine_rig import BLOCK, request
from tests.support.tiers.tiers_rig import FailingStore, TieredRig

BLOCKS = 4
PROMPTS = [random.Random(seed).choices(range(32, 127), k=BLOCKS * BLOCK) for seed in range(8)]


@pytest.fixture
def disk() -> FailingStore:
    return FailingStore(64, BLOCK * 16)


@pytest.fixture
def rig(request: pytest.FixtureRequest, disk: FailingStore) -> Iterator[TieredRig]:
    """All prompts are on a disk that does not answer until it may, and nowhere else."""
    rig = TieredRig(48, disk, num_blocks=getattr(request, "param", 128))
    for seed, prompt in enumerate(PROMPTS):
        rig.core.add_request(_request(f"first-{seed}", prompt))
        rig.settle()
    for block_hash in list(rig.below.host.index.hashes()):
        rig.below.host.index.drop(block_hash)
    rig.core.pool.forget()
    disk.may_read.clear()
    yield rig
    rig.core.close()


def _request(name: str, prompt: list[int]):  # type: ignore[no-untyped-def]
    return request(name, prompt, max_tokens=3)


def fetch(rig: TieredRig, name: str, seed: int) -> list[list[int]]:
    """Asks for a prefix; what is held of it, once it is known. After a refusal nothing is left of it."""
    held: list[list[int]] = []
    wanted = request(name, PROMPTS[seed], max_tokens=1, prefill_only=True, prefix_only=True)
    try:
        rig.core.hold_prefix(wanted, held.append)
    except BaseException:
        rig.core.abort(name)
        assert rig.core.release_held(name)
        raise
    return held


def end(rig: TieredRig, disk: FailingStore, *names: str) -> None:
    disk.may_read.set()
    rig.settle()
    for name in names:
        assert rig.core.release_held(name)
    rig.assert_clean()


def test_so_many_are_read_at_a_time(rig: TieredRig, disk: FailingStore) -> None:
    names = [str(seed) for seed in range(MOST_PEER_READS)]
    held = [fetch(rig, name, seed) for seed, name in enumerate(names)]
    before = rig.core.load()
    with pytest.raises(ResourceExhaustedError, match="4 reads for peers, of 16 KV blocks") as refused:
        fetch(rig, "more", MOST_PEER_READS)
    assert refused.value.reason == "PREFIX_READS_FULL"
    assert rig.core.load() == before
    again = fetch(rig, "again", 0)
    rig.core.add_request(_request("prompt", PROMPTS[MOST_PEER_READS]))
    assert len(rig.below.under_way) == MOST_PEER_READS + 1, "one waits with the first, a prompt is read for"
    end(rig, disk, *names, "again")
    assert [len(blocks) for [blocks] in [*held, again]] == [BLOCKS] * (MOST_PEER_READS + 1)
    assert rig.outputs["prompt"].token_ids == expected_tokens(PROMPTS[MOST_PEER_READS], 3)
    last = fetch(rig, "more", MOST_PEER_READS + 1)
    end(rig, disk, "more")
    assert [len(blocks) for blocks in last] == [BLOCKS], "there is room again"


@pytest.mark.parametrize("rig", [20], indirect=True)
def test_one_may_have_the_room_of_reads_and_several_half_of_it(rig: TieredRig, disk: FailingStore) -> None:
    held = fetch(rig, "one", 0)
    with pytest.raises(ResourceExhaustedError, match="1 reads for peers, of 4 KV blocks"):
        fetch(rig, "two", 1)
    end(rig, disk, "one")
    assert [len(blocks) for blocks in held] == [BLOCKS]


def test_what_is_in_the_pool_is_no_read(rig: TieredRig, disk: FailingStore) -> None:
    names = [str(seed) for seed in range(MOST_PEER_READS)]
    for seed, name in enumerate(names):
        fetch(rig, name, seed)
    rig.core.add_request(_request("new", fresh := [55] * BLOCK * BLOCKS))
    rig.run()
    PROMPTS.append(fresh)
    try:
        held = fetch(rig, "cached", len(PROMPTS) - 1)
    finally:
        PROMPTS.pop()
    assert [len(blocks) for blocks in held] == [BLOCKS]
    end(rig, disk, *names, "cached")


def test_one_that_reads_on_after_another_s_read_is_told_why_it_is_refused(
    rig: TieredRig, disk: FailingStore
) -> None:
    rig.core.add_request(_request("prompt", PROMPTS[7][: 2 * BLOCK + 1]))
    held: list[list[int] | ResourceExhaustedError] = fetch(rig, "longer", 7)  # type: ignore[assignment]
    names = [str(seed) for seed in range(MOST_PEER_READS)]
    for seed, name in enumerate(names):
        fetch(rig, name, seed)
    assert len(rig.below.under_way) == MOST_PEER_READS + 1, "it waits with the prompt"
    end(rig, disk, *names, "longer")
    (refusal,) = held
    assert isinstance(refusal, ResourceExhaustedError)
    assert (refusal.reason, refusal.retry_after_s) == ("PREFIX_READS_FULL", 1.0)
