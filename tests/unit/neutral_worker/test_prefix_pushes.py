"""Which prefix is written next."""

from __future__ import annotations

from engine.core.precedence import Precedence
from prefill_worker.prefix_pushes import LEAST_PIECE_BYTES, PIECE_S, PrefixPush, PrefixPushes

BLOCK_BYTES = 2**20
PER_PIECE = LEAST_PIECE_BYTES // BLOCK_BYTES


class Rig:
    def __init__(self) -> None:
        self.pushes = PrefixPushes(BLOCK_BYTES)
        self.over: set[str] = set()
        self.busy: set[str] = set()
        self.gb_per_s = 0.0

    def add(self, name: str, peer: str = "p", rank: int = 0, blocks: int = 2) -> None:
        self.pushes.add(PrefixPush(name, peer, Precedence(rank)), range(blocks))

    def due(self) -> list[tuple[str, int, bool]]:
        """Name, end and whether it is the last one of each piece."""
        pieces = self.pushes.due(self.over.__contains__, self.busy.__contains__, lambda peer: self.gb_per_s)
        return [(piece.push.request_id, piece.end, piece.is_last) for piece in pieces]


def test_nothing_goes_to_a_peer_that_is_written_to() -> None:
    rig = Rig()
    rig.busy = {"p"}
    rig.add("fetch")
    rig.add("other", "q")
    assert rig.due() == [("other", 2, True)]
    rig.busy = set()
    assert rig.due() == [("fetch", 2, True)]
    assert rig.due() == []
    assert len(rig.pushes) == 0


def test_fetches_go_before_seeds_and_each_in_order_of_arrival() -> None:
    rig = Rig()
    for name, rank in (("seed", -2), ("first", -1), ("second", -1)):
        rig.add(name, rank=rank)
    assert [name for _ in range(3) for name, _, _ in rig.due()] == ["first", "second", "seed"]


def test_long_ones_go_in_pieces_that_take_their_lane_for_a_moment() -> None:
    rig = Rig()
    rig.add("long", blocks=2 * PER_PIECE + 1)
    ends = [rig.due()[0][1:] for _ in range(3)]
    assert ends == [(PER_PIECE, False), (2 * PER_PIECE, False), (2 * PER_PIECE + 1, True)]
    rig.gb_per_s = 10.0
    rig.add("fast", blocks=1000)
    assert rig.due() == [("fast", int(10e9 * PIECE_S) // BLOCK_BYTES, False)]
    rig.add("seed", rank=-2)
    rig.over = {"fast"}
    assert rig.due() == [("seed", 2, True)]


def test_what_is_gone_is_said_at_once() -> None:
    rig = Rig()
    rig.busy = {"p"}
    rig.add("gone", blocks=0)
    assert rig.due() == [("gone", 0, True)]
    assert len(rig.pushes) == 0
