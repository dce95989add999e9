"""The prefix cache's log: readers report what is cached, whatever happens between two messages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache import block_pool
from engine.kv_cache.block_pool import BlockPool, KvEventLog, KvEventReader
from splitserve.generation.kv_blocks import NAME_BYTES, block_keys, extend_block_hashes, keys_of, name_of
from splitserve.v1 import registry_pb2


def hashed(number: int) -> bytes:
    return number.to_bytes(2, "big") * 16


class Coordinator:
    """Applies a reader's messages, and checks their sequence numbers."""

    def __init__(self, log: KvEventLog) -> None:
        self.reader = KvEventReader(log)
        self.names: set[bytes] = set()
        self.sequence = 0

    def take(self, events: registry_pb2.CacheEvents | None) -> None:
        if events is None:
            return
        self.sequence += 1
        assert events.sequence == self.sequence
        if events.cleared:
            self.names.clear()
        self.names.difference_update(split(events.removed))
        self.names.update(split(events.stored))

    def catch_up(self) -> set[bytes]:
        self.take(self.reader.next_events())
        while self.reader.has_more:
            self.take(self.reader.next_events())
        return self.names


def split(names: bytes) -> list[bytes]:
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def test_the_first_message_clears_and_lists_everything() -> None:
    log = KvEventLog()
    log.stored(hashed(1))
    first = KvEventReader(log).next_events()
    assert first == registry_pb2.CacheEvents(sequence=1, cleared=True, stored=name_of(hashed(1)))


def test_without_changes_there_is_no_message() -> None:
    reader = KvEventReader(KvEventLog())
    assert reader.next_events() == registry_pb2.CacheEvents(sequence=1, cleared=True)
    assert reader.next_events() is None


def test_several_changes_of_a_name_are_sent_as_one() -> None:
    log = KvEventLog()
    reader = KvEventReader(log)
    reader.next_events()
    log.stored(hashed(1))
    log.removed(hashed(1))
    log.stored(hashed(2))
    events = reader.next_events()
    assert events is not None
    assert (events.removed, events.stored) == (name_of(hashed(1)), name_of(hashed(2)))


def test_large_caches_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "NAMES_A_MESSAGE", 10)
    log = KvEventLog()
    for number in range(35):
        log.stored(hashed(number))
    coordinator = Coordinator(log)
    assert coordinator.catch_up() == {name_of(hashed(number)) for number in range(35)}
    assert coordinator.sequence == 4


def test_a_change_is_announced_once_until_it_is_read() -> None:
    log, calls = KvEventLog(), []
    log.subscribe(lambda: calls.append(1))
    reader = KvEventReader(log)
    log.stored(hashed(1))
    log.stored(hashed(2))
    assert calls == [1]
    reader.next_events()
    log.removed(hashed(1))
    assert calls == [1, 1]


def test_a_pool_logs_what_it_caches_and_evicts() -> None:
    log = KvEventLog()
    pool, coordinator = BlockPool(3, log), Coordinator(log)
    blocks = pool.allocate(2)
    for number, block in enumerate(blocks):
        pool.cache(block, hashed(number))
    assert coordinator.catch_up() == {name_of(hashed(0)), name_of(hashed(1))}
    pool.release(blocks)
    pool.allocate(2)
    assert coordinator.catch_up() == {name_of(hashed(0))}  # the last block of a prefix goes first


def test_keys_are_those_of_the_workers_names() -> None:
    tokens, hashes = list(range(100)), list[bytes]()
    extend_block_hashes(hashes, tokens, 16, b"salt", 6)
    keys = block_keys(tokens, 16, b"salt", 100)
    assert list(keys) == keys_of(b"".join(map(name_of, hashes)))
    assert len(keys) == 6
    assert block_keys(tokens, 16, b"salt", 2) == keys[:2]
    assert not set(keys) & set(block_keys(tokens, 16, b"other", 100))


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "read", "resync"]), st.integers(0, 20))))
def test_two_readers_know_what_is_cached(steps: list[tuple[str, int]]) -> None:
    log, cached = KvEventLog(max_logged=8), set[bytes]()
    coordinators = [Coordinator(log), Coordinator(log)]
    for action, number in steps:
        name = name_of(hashed(number))
        match action:
            case "store" if name not in cached:
                cached.add(name)
                log.stored(hashed(number))
            case "remove" if name in cached:
                cached.discard(name)
                log.removed(hashed(number))
            case "read":
                assert coordinators[number % 2].catch_up() == cached
            case "resync":
                coordinators[number % 2].reader.resync()
    random.Random(len(steps)).shuffle(coordinators)
    assert all(coordinator.catch_up() == cached for coordinator in coordinators)
