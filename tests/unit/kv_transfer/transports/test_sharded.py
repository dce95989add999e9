"""A joined write ends when the last of its parts has, in whatever order and however often the ends are reported."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transports.sharded import JoinedWrites
from kv_transfer.transports.transport import WriteResult

PARTS = [(rank, handle) for rank in range(3) for handle in range(1, 3)]


@st.composite
def reports(draw: st.DrawFn) -> list[tuple[int, WriteResult]]:
    """Ends of all parts of two writes, some lost, some reported twice, in any order."""
    order = draw(st.permutations(PARTS * 2))
    lost = draw(st.sets(st.sampled_from(PARTS), max_size=2))
    failed = draw(st.dictionaries(st.sampled_from(PARTS), st.booleans(), max_size=3))
    return [
        (rank, WriteResult(handle, "broken" if part in failed else None, failed.get(part, False)))
        for part in order
        if part not in lost
        for rank, handle in [part]
    ]


@given(reports())
def test_each_write_ends_once_and_only_with_all_its_parts(ends: list[tuple[int, WriteResult]]) -> None:
    writes = JoinedWrites()
    members = {
        writes.begin("peer", [(rank, number) for rank in range(3)], b"%d" % number, None): number
        for number in (1, 2)
    }
    assert all(handle < 0 for handle in members)
    ended: dict[int, set[int]] = {}
    results: dict[int, WriteResult] = {}
    first: dict[tuple[int, int], WriteResult] = {}
    for rank, part in ends:
        first.setdefault((rank, part.handle), part)
        ended.setdefault(part.handle, set()).add(rank)
        write = writes.end(rank, part)
        if write is not None:
            number = members[write.handle]
            assert ended[number] == {0, 1, 2}
            assert number not in results
            assert write.notification == b"%d" % number
            results[number] = write.result
    for number in (1, 2):
        parts = [first.get((rank, number)) for rank in range(3)]
        if None in parts:
            assert number not in results, "a part that was lost may still be on its way"
            continue
        assert (results[number].error is None) == all(part.error is None for part in parts if part)
        assert results[number].in_doubt == any(part.in_doubt for part in parts if part)


def test_a_write_with_a_part_that_was_not_posted_fails_when_the_others_have_ended() -> None:
    writes = JoinedWrites()
    handle = writes.begin("peer", [(0, 7)], b"done", "rank 1 is not connected")
    assert writes.holds(0, 7)
    assert not writes.holds(1, 7)
    write = writes.end(0, WriteResult(7))
    assert write is not None
    assert write.result == WriteResult(handle, "rank 1 is not connected", in_doubt=False)
    assert writes.end(0, WriteResult(7)) is None
