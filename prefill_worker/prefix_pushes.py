"""Which cached prefixes a worker writes next: in pieces, after requests' own handoffs, fetches before seeds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.precedence import Precedence
from splitserve.errors import SplitserveError

LEAST_PIECE_BYTES = 4 * 2**20
PIECE_S = 0.05
"""A request's handoff waits at most so long for a piece that its lane was given before."""


@dataclass(slots=True)
class PrefixPush:
    """A prefix whose blocks are held until they are written."""

    request_id: str
    agent_id: str
    """Whom it goes to."""
    precedence: Precedence
    blocks: Sequence[int] = ()
    """Empty if one of them is gone, or with a `refusal`."""
    refusal: SplitserveError | None = None
    """Why it is not held, if that is known."""
    posted: int = 0
    """Leading blocks that were given to the pusher."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is to be written now: the prefix's blocks up to `end`."""

    push: PrefixPush
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the prefix is complete with it."""
        return self.end == len(self.push.blocks)


class PrefixPushes:
    """Prefixes that are not all given to the pusher yet."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._waiting: list[PrefixPush] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, push: PrefixPush, held: Sequence[int] | SplitserveError) -> None:
        """Queues a prefix that is held now in these blocks, behind those of its class and before those of lower ones;
        or why it is not."""
        if isinstance(held, SplitserveError):
            push.refusal = held
        else:
            push.blocks = held
        self._waiting.append(push)
        self._waiting.sort(key=lambda each: -each.precedence.class_rank)

    def due(
        self, is_over: Callable[[str], bool], is_busy: Callable[[str], bool], gb_per_s: Callable[[str], float]
    ) -> list[Piece]:
        """The pieces to be written now, at most one to each peer; of one that is not held an empty one.

        Those that are over, by request id, are dropped.

        `is_busy`: whether writes to a peer are in flight; `gb_per_s`: of the lane to it, 0 if unknown.
        """
        self._waiting = [push for push in self._waiting if not is_over(push.request_id)]
        gone = [Piece(push, 0) for push in self._waiting if not push.blocks]
        pieces: dict[str, Piece] = {}
        for push in self._waiting:
            if not push.blocks or push.agent_id in pieces or is_busy(push.agent_id):
                continue
            most = max(LEAST_PIECE_BYTES, int(gb_per_s(push.agent_id) * 1e9 * PIECE_S))
            end = min(len(push.blocks), push.posted + max(1, most // self._block_bytes))
            push.posted = end
            pieces[push.agent_id] = Piece(push, end)
        self._waiting = [push for push in self._waiting if push.posted < len(push.blocks)]
        return [*gone, *pieces.values()]
