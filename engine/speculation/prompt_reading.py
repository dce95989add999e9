"""When a draft model computes a sequence's tokens, and how many in a step: a pure policy.

A handoff brings the first model's KV only, so a draft model has to read the prompt on the decode worker, where that
takes time from every stream of the batch. What it may take is what the streams are ahead: of their due times, or of
the share of plain decoding that those without a target are owed (`draft_room.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from engine.speculation.draft_lengths import Share

READY = 16
"""So few tokens behind, a sequence is guessed for at once: they take about as long as a guess."""
MIN_CHUNK = 32
"""Tokens are read in at least this many, or up to the last one: a step has a price of its own."""
MAX_CHUNK = 256
MAX_STEPS = 4.0
"""Nobody waits for a chunk longer than this many plain steps, whatever it is ahead."""


def pays(behind_s: float, emitted: int, further: int, saved_s: float, waits: float) -> bool:
    """Whether reading, which takes `behind_s` in all, is expected to be paid back by `saved_s` a token.

    An answer is expected to go on for as long as it has, and for `further` tokens at most; it goes on without drafts
    for `waits` tokens until all is read. So what is lost at the end of an answer is at most what it would have gained
    by then, had it been read at its start.
    """
    return (min(emitted, further) - waits) * saved_s > behind_s


def ahead_s(shares: Sequence[Share], longest: float, plain_s: float) -> float:
    """Seconds by which the next step may be later than a plain one of `plain_s`, which all streams get a token of.

    `longest`: as in `choose_lengths`.
    """
    owed = [share for share in shares if share.tokens]
    steps = min([longest - 1.0, *((share.credit + 1.0 - share.tokens) / share.tokens for share in owed)])
    return max(0.0, steps) * plain_s if plain_s else 0.0


def steps_to_read(behind_s: float, ahead: float, regained_s: float) -> float:
    """Steps until all is read, where streams are `ahead` seconds now and `regained_s` more with each plain step."""
    if behind_s <= ahead:
        return 0.0
    return (behind_s - ahead) / regained_s if regained_s > 0 else math.inf


def chunk_tokens(behind: int, chunk_s: float, ahead: float, plain_s: float) -> int:
    """How many of the tokens that a sequence is behind to compute within what streams are `ahead`; 0: too few.
    `chunk_s`: of `MIN_CHUNK` tokens."""
    least, room_s = min(behind, MIN_CHUNK), min(ahead, MAX_STEPS * plain_s)
    fitting = int(room_s / chunk_s * MIN_CHUNK) if chunk_s else MIN_CHUNK
    return min(behind, fitting, MAX_CHUNK) if fitting >= least else 0


class ReadingChance(NamedTuple):
    """What a step knows: seconds that drafts save a token, that streams are ahead, and that a plain step of `plain_s`
    adds to that."""

    saved_s: float
    ahead: float
    regained_s: float
    plain_s: float

    def tokens(self, behind: int, behind_s: float, chunk_s: float, emitted: int, further: int) -> int | None:
        """How many tokens to read now of a sequence that is `behind`; None where reading it does not pay."""
        waits = steps_to_read(behind_s, self.ahead, self.regained_s)
        if not pays(behind_s, emitted, further, self.saved_s, waits):
            return None
        return chunk_tokens(behind, chunk_s, self.ahead, self.plain_s)
