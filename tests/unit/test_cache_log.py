"""The prefix cache's log: what sessions tell equals what is cached, whatever happens between two messages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import cache_log
from engine.block_pool import BlockPool
from engine.cache_log import CacheLog, CacheSession
from splitserve.block_hashes import NAME_BYTES, block_keys, extend_block_hashes, keys_of, name_of
from splitserve.v1 import registry_pb2


def hashed(number: int) -> bytes:
    return number.to_bytes(2, "big") * 16


class Listener:
    """Keeps what a session told, and checks the sequence."""

    def __init__(self, log: CacheLog) -> None:
        self.session = CacheSession(log)
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
        self.take(self.session.next_events())
        while self.session.has_more:
            self.take(self.session.next_events())
        return self.names


def split(names: bytes) -> list[bytes]:
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def test_the_first_message_clears_and_tells_everything() -> None:
    log = CacheLog()
    log.stored(hashed(1))
    first = CacheSession(log).next_events()
    assert first == registry_pb2.CacheEvents(sequence=1, cleared=True, stored=name_of(hashed(1)))


def test_nothing_new_is_no_message() -> None:
    session = CacheSession(CacheLog())
    assert session.next_events() == registry_pb2.CacheEvents(sequence=1, cleared=True)
    assert session.next_events() is None


def test_what_came_and_went_is_told_once() -> None:
    log = CacheLog()
    session = CacheSession(log)
    session.next_events()
    log.stored(hashed(1))
    log.removed(hashed(1))
    log.stored(hashed(2))
    events = session.next_events()
    assert events is not None
    assert (events.removed, events.stored) == (name_of(hashed(1)), name_of(hashed(2)))


def test_long_caches_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_log, "MAX_NAMES_A_MESSAGE", 10)
    log = CacheLog()
    for number in range(35):
        log.stored(hashed(number))
    listener = Listener(log)
    assert listener.catch_up() == {name_of(hashed(number)) for number in range(35)}
    assert listener.sequence == 4


def test_a_change_is_announced_once_until_it_is_read() -> None:
    log, heard = CacheLog(), []
    log.tell(lambda: heard.append(1))
    session = CacheSession(log)
    log.stored(hashed(1))
    log.stored(hashed(2))
    assert heard == [1]
    session.next_events()
    log.removed(hashed(1))
    assert heard == [1, 1]


def test_a_pool_tells_what_it_caches_and_evicts() -> None:
    log = CacheLog()
    pool, listener = BlockPool(3, log), Listener(log)
    blocks = pool.allocate(2)
    for number, block in enumerate(blocks):
        pool.cache(block, hashed(number))
    assert listener.catch_up() == {name_of(hashed(0)), name_of(hashed(1))}
    pool.release(blocks)
    pool.allocate(2)
    assert listener.catch_up() == {name_of(hashed(0))}  # the last block of a prefix goes first


def test_keys_are_those_of_the_workers_names() -> None:
    tokens, hashes = list(range(100)), list[bytes]()
    extend_block_hashes(hashes, tokens, 16, b"salt", 6)
    keys = block_keys(tokens, 16, b"salt", 100)
    assert list(keys) == keys_of(b"".join(map(name_of, hashes)))
    assert len(keys) == 6
    assert block_keys(tokens, 16, b"salt", 2) == keys[:2]
    assert not set(keys) & set(block_keys(tokens, 16, b"other", 100))


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "read", "resync"]), st.integers(0, 20))))
def test_two_sessions_know_what_is_cached(steps: list[tuple[str, int]]) -> None:
    log, cached = CacheLog(max_logged=8), set[bytes]()
    listeners = [Listener(log), Listener(log)]
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
                assert listeners[number % 2].catch_up() == cached
            case "resync":
                listeners[number % 2].session.resync()
    random.Random(len(steps)).shuffle(listeners)
    assert all(listener.catch_up() == cached for listener in listeners)
