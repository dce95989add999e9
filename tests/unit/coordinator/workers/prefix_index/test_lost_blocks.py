"""A block that a shared store was found to lack does not count as shared until it has been written again."""

from __future__ import annotations

import array
import itertools

import pytest

from coordinator.workers.prefix_index.index import PrefixIndex
from coordinator.workers.prefix_index.lost_blocks import MOST_LOST, LostBlocks
from coordinator.workers.snapshot import WorkerKey
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import registry_pb2

HOLDER, READER, OTHER = ("holder", 1), ("reader", 1), ("other", 1)
STORE = 7
PROMPT = (1, 2, 3, 4, 5, 6)


def names(*keys: int) -> bytes:
    return array.array("Q", keys).tobytes()


class Workers:
    """Of an index, and where their streams of events are."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._sequences: dict[WorkerKey, itertools.count[int]] = {}

    def says(self, worker: WorkerKey, *, lost: tuple[int, ...] = (), **changed: tuple[int, ...]) -> None:
        """What is lost is removed, too."""
        number = next(self._sequences.setdefault(worker, itertools.count(1)))
        places = {name: names(*keys) for name, keys in changed.items()}
        places["removed"] = places.get("removed", b"") + names(*lost)
        events = registry_pb2.CacheEvents(
            sequence=number, cleared=number == 1, tiered=True, lost=names(*lost), **places
        )
        self.index.apply(worker, events)
        self.index.share(worker, STORE)

    def depths(self, worker: WorkerKey) -> list[int]:
        """Blocks of the prompt that it can read, has in host memory or nearer, and in its pool."""
        found = self.index.hits(PROMPT, 0.0)
        return [found.blocks(slot) for slot in self.index.slots_of(worker)]


@pytest.fixture
def workers() -> Workers:
    """One has the prompt in its memory and has written it, as far as it knows; the others have read some of it."""
    made = Workers()
    made.says(HOLDER, stored=(1, 2, 3), in_host=(4, 5), on_disk=(6,))
    made.says(READER, stored=(1,))
    made.says(OTHER, on_disk=(1, 2, 3, 4))
    assert [made.depths(each)[0] for each in (HOLDER, READER, OTHER)] == [6, 6, 6]
    return made


def test_the_reader_and_routing_stop_counting_it_at_once(workers: Workers) -> None:
    workers.says(READER, lost=(3,))
    assert workers.depths(READER) == [2, 1, 1]
    assert workers.depths(OTHER)[0] == 2, "its books name what the store does not have"
    assert workers.depths(HOLDER) == [5, 5, 3], "it has them in its own memory; what follows is of no use"


def test_blocks_after_it_that_the_reader_knows_of_do_not_count_either(workers: Workers) -> None:
    workers.says(READER, on_disk=(2, 3, 4, 5, 6))
    workers.says(READER, lost=(3,))
    assert workers.depths(READER) == [2, 1, 1]


def test_until_one_has_it_that_did_not(workers: Workers) -> None:
    workers.says(READER, lost=(3,))
    workers.says(HOLDER, in_host=(3,))
    workers.says(HOLDER, on_disk=(3, 4, 5))
    assert workers.depths(READER)[0] == 2, "only its place at the holder has changed"
    workers.says(READER, stored=(2, 3))
    assert workers.depths(READER) == [6, 3, 3]
    assert workers.depths(OTHER)[0] == 6


def test_several_are_lost_and_found_by_themselves(workers: Workers) -> None:
    workers.says(READER, lost=(5,))
    workers.says(OTHER, lost=(3,))
    assert workers.depths(READER)[0] == 2
    workers.says(OTHER, stored=(3,))
    assert workers.depths(READER)[0] == 4
    workers.says(READER, on_disk=(2, 3, 4, 5))
    assert workers.depths(OTHER)[0] == 6


def test_what_nobody_holds_or_another_store_lacks_is_not_lost(workers: Workers) -> None:
    workers.says(READER, lost=(99,))
    assert not len(workers.index._lost)
    stranger = ("stranger", 1)
    workers.says(stranger, stored=(1,))
    workers.index.share(stranger, STORE + 1)
    workers.index.apply(
        stranger,
        registry_pb2.CacheEvents(sequence=2, tiered=True, removed=names(3), lost=names(3)),
    )
    assert workers.depths(READER)[0] == 6
    workers.index.forget(stranger)
    workers.says(("new", 1), stored=(1,))
    workers.depths(READER)
    assert not len(workers.index._lost), "nobody shares that store any more"


def test_one_that_shares_nothing_cannot_lose(workers: Workers) -> None:
    workers.index.share(READER, 0)
    workers.says(READER, lost=(3,))
    assert workers.depths(OTHER)[0] == 6


def test_the_holder_goes(workers: Workers) -> None:
    workers.says(READER, lost=(3,))
    workers.index.forget(HOLDER)
    assert [workers.depths(each)[0] for each in (READER, OTHER)] == [2, 2]


@pytest.mark.parametrize("lost", [b"short", names(*range(MOST_LOST + 1))])
def test_names_are_checked(lost: bytes) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        PrefixIndex().apply(READER, registry_pb2.CacheEvents(sequence=1, tiered=True, lost=lost))
    assert refused.value.field == "cache_events.lost"


def test_only_workers_with_tiers_lose() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        PrefixIndex().apply(READER, registry_pb2.CacheEvents(sequence=1, lost=names(1)))
    assert refused.value.field == "cache_events.tiered"


def test_they_are_bounded() -> None:
    lost = LostBlocks()
    lost.add(STORE, range(MOST_LOST + 5))
    assert len(lost) == MOST_LOST
    assert lost.before(STORE, [4, 5], 2) == 1, "the first ones count as shared again"
    lost.keep([STORE + 1])
    assert len(lost) == 0
    lost.discard(STORE, 5)
    assert lost.before(STORE, [5], 1) == 1


def test_one_that_is_lost_again_counts_as_lost_last() -> None:
    lost = LostBlocks()
    lost.add(STORE, range(MOST_LOST))
    lost.add(STORE, [0])
    lost.add(STORE, [MOST_LOST])
    assert lost.among(STORE, [0, 1, 2, MOST_LOST]) == [0, 2, MOST_LOST]


def test_a_message_that_names_all_that_may_be_lost_is_taken(workers: Workers) -> None:
    every = tuple(range(MOST_LOST))
    workers.says(OTHER, on_disk=every)
    workers.says(READER, lost=every)
    assert len(workers.index._lost) == MOST_LOST
