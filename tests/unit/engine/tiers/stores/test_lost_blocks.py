"""Who finds that a shared store lacks a block, or has it damaged, says so once; and computes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.kv_cache.cache_events import KvEventLog, KvEventReader
from engine.runner.simulated_runner import expected_tokens
from engine.tiers.stores.shared_folder import open_shared_folder
from engine.tiers.stores.shared_store import SharedStore
from splitserve.generation.kv_blocks import extend_block_hashes, name_of
from tests.support.engine.engine_rig import BLOCK, request
from tests.support.tiers.shared_rig import FakeMooncake
from tests.support.tiers.tiers_rig import TieredRig

BLOCK_BYTES = BLOCK * 16
LENGTH, FULL = 40, 9
PROMPT = random.Random(0).choices(range(32, 127), k=LENGTH)
HASHES: list[bytes] = []
extend_block_hashes(HASHES, PROMPT, BLOCK, b"", FULL)


class Told:
    """What coordinators hear of a worker, from its beginning."""

    def __init__(self, rig: TieredRig) -> None:
        self._log = rig.core.kv_events
        self.lost: list[bytes] = []
        record = self._log.removed

        def removed(block_hash: bytes, *, lost: bool = False) -> None:
            if lost:
                self.lost.append(block_hash)
            record(block_hash, lost=lost)

        self._log.removed = removed  # type: ignore[method-assign]


@pytest.fixture
def fake() -> FakeMooncake:
    return FakeMooncake()


@pytest.fixture
def start(fake: FakeMooncake) -> Iterator[Callable[[], TieredRig]]:
    rigs = []

    def begin() -> TieredRig:
        rigs.append(TieredRig(64, fake.store(BLOCK_BYTES, 64), num_blocks=48))
        rigs[-1].below._prompt_fit = lambda: None
        return rigs[-1]

    yield begin
    for rig in rigs:
        rig.core.close()


@pytest.fixture
def rig(start: Callable[[], TieredRig]) -> TieredRig:
    """A worker beside one that has written a prompt."""
    ask(start(), "first")
    return start()


def ask(rig: TieredRig, name: str, tokens: list[int] = PROMPT) -> None:
    """With every token."""
    rig.core.add_request(request(name, tokens, max_tokens=3))
    rig.settle()
    assert rig.outputs[name].token_ids == expected_tokens(tokens, 3)
    rig.assert_clean()


def key_of(fake: FakeMooncake, block: int) -> str:
    (key,) = (key for key in fake.objects if key.endswith(HASHES[block].hex()))
    return key


@pytest.mark.parametrize("how", ["missing", "torn"])
def test_a_read_that_finds_a_block_gone_says_so_once(rig: TieredRig, fake: FakeMooncake, how: str) -> None:
    told, key, read = Told(rig), key_of(fake, 4), rig.below.all["disk"].store.read

    def gone(slot: int, block_hash: bytes) -> memoryview | None:
        """It goes in the middle of the read."""
        if block_hash == HASHES[3] and how == "missing":
            fake.objects.pop(key, None)
        elif block_hash == HASHES[3]:
            fake.objects[key] = fake.objects[key][:-5] + b"torn!"
        return read(slot, block_hash)

    rig.below.all["disk"].store.read = gone  # type: ignore[method-assign]
    ask(rig, "a")
    rig.below.all["disk"].store.read = read  # type: ignore[method-assign]
    assert told.lost == [HASHES[4]]
    assert rig.hits()["disk"] == 4 * BLOCK
    assert key in fake.objects, "it is written again"
    rig.core.pool.forget()
    for block_hash in list(rig.below.host.index.hashes()):
        rig.below.host.index.drop(block_hash)
    ask(rig, "again")
    assert told.lost == [HASHES[4]]
    assert rig.hits()["disk"] == (4 + FULL) * BLOCK


def test_a_look_up_that_does_not_find_one_says_so(rig: TieredRig, fake: FakeMooncake) -> None:
    del fake.objects[key_of(fake, 4)]
    told = Told(rig)
    ask(rig, "a")
    assert told.lost == [HASHES[4]]
    ask(rig, "again")
    assert told.lost == [HASHES[4]], "it has it itself now"


def test_coordinators_hear_of_it_until_the_worker_has_the_block() -> None:
    log = KvEventLog()
    log.tiered = True
    reader = KvEventReader(log)
    log.stored(HASHES[0], "disk")
    reader.next_events()
    log.removed(HASHES[0], lost=True)
    log.removed(HASHES[1])
    events = reader.next_events()
    assert events is not None
    assert events.lost == name_of(HASHES[0])
    assert events.removed == name_of(HASHES[1]) + name_of(HASHES[0])
    log.removed(HASHES[0], lost=True)
    log.stored(HASHES[0])
    events = reader.next_events()
    assert events is not None
    assert (events.lost, events.removed, events.stored) == (b"", b"", name_of(HASHES[0]))
    log.removed(HASHES[0], lost=True)
    reader.resync()
    events = reader.next_events()
    assert events is not None
    assert (events.lost, events.removed, events.stored) == (b"", b"", b""), "nothing is cached"


def test_a_store_that_cannot_be_read_or_asked_says_nothing(rig: TieredRig, fake: FakeMooncake) -> None:
    told = Told(rig)
    fake.fails = True
    ask(rig, "asked")
    fake.fails = False
    rig.core.pool.forget()
    for tier in rig.below.all.values():
        for block_hash in list(tier.index.hashes()):
            tier.index.drop(block_hash)
    get, fake.get_into = fake.get_into, lambda *_: -1  # type: ignore[method-assign]
    ask(rig, "read")
    fake.get_into = get  # type: ignore[method-assign]
    assert told.lost == []
    assert rig.below.all["disk"].stats.failures["read"] == 1


def test_a_worker_s_own_disk_loses_nothing_of_others(tmp_path: Path) -> None:
    rig = TieredRig(64, tmp_path, num_blocks=48)
    rig.below._prompt_fit = lambda: None
    told = Told(rig)
    ask(rig, "a")
    rig.core.pool.forget()
    for block_hash in list(rig.below.host.index.hashes()):
        rig.below.host.index.drop(block_hash)
    rig.below.all["disk"].store._checksums.clear()  # type: ignore[attr-defined]
    ask(rig, "again")
    assert rig.below.all["disk"].stats.failures["read"] == 1
    assert told.lost == []
    rig.core.close()


def test_two_that_read_a_folder_while_it_evicts_answer_and_write_it_again(tmp_path: Path) -> None:
    """With a file that is torn behind the one that is evicted."""
    rigs = [TieredRig(64, folder(tmp_path), num_blocks=48) for _ in range(3)]
    for rig in rigs:
        rig.below._prompt_fit = lambda: None
    writer, *readers = rigs
    ask(writer, "first")
    files = {each.name[-64:]: each for each in tmp_path.rglob("*-*") if each.is_file()}
    told = [Told(rig) for rig in readers]

    def evicts(read: Callable[[int, bytes], memoryview | None], slot: int, block_hash: bytes) -> object:
        if block_hash == HASHES[3]:
            files[HASHES[4].hex()].unlink(missing_ok=True)
            torn = files[HASHES[6].hex()]
            torn.write_bytes(torn.read_bytes()[:-1])
        return read(slot, block_hash)

    for rig in readers:
        store = rig.below.all["disk"].store
        store.read = partial(evicts, store.read)  # type: ignore[method-assign, assignment]
        rig.core.add_request(request("a", PROMPT, max_tokens=3))
    for rig in readers:
        rig.settle()
        assert rig.outputs["a"].token_ids == expected_tokens(PROMPT, 3)
        rig.assert_clean()
    for each in told:  # the other one may have written it again by then
        assert each.lost in ([HASHES[4]], [HASHES[6]])
    assert files[HASHES[4].hex()].exists()
    for rig in rigs:
        rig.core.close()


def folder(path: Path) -> SharedStore:
    return open_shared_folder(path, bytes(32), BLOCK_BYTES, 2**22)
