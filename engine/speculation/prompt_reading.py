"""When a draft model computes a sequence's tokens, and how many in a step: a pure policy.

A handoff brings the first model's KV only, so a draft model has to read the prompt on the decode worker, where that
takes time from every stream of the batch. What it may take is what the streams are ahead: of their due times, or of
the share of plain decoding that those without a target are owed (`draft_room.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.draft_lengths import Share

READY = 16
"""So few tokens behind, a sequence is guessed for at once: they take about as long as a guess."""
MIN_CHUNK = 32
"""Tokens are read in at least this many, or up to the last one: a step has a price of its own."""
MAX_CHUNK = 256
MAX_STEPS = 4.0
"""Nobody waits for a chunk longer than this many plain steps, whatever it is ahead."""


def pays(behind_s: float, emitted: int, further: int, saved_s: float) -> bool:
    """Whether reading, which takes `behind_s` in all, is expected to be paid back by `saved_s` a token.

    An answer is expected to go on for as long as it has, and for `further` tokens at most. So what is lost at the end
    of an answer is at most what it would have gained by then, had it been read at its start.
    """
    return min(emitted, further) * saved_s > behind_s


def slack_s(shares: Sequence[Share], longest: float, plain_s: float) -> float:
    """Seconds by which the next step may be later than a plain one of `plain_s`, which all streams get a token of.

    `longest`: as in `choose_lengths`.
    """
    steps = min(
        [
            longest - 1.0,
            *((share.credit + 1.0 - share.tokens) / share.tokens for share in shares if share.tokens),
        ]
    )
    return max(0.0, min(steps, MAX_STEPS)) * plain_s


def chunk_tokens(behind: int, chunk_s: float, slack: float) -> int:
    """How many of the tokens that a sequence is behind to compute within `slack` seconds; 0: too few. `chunk_s`: of
    `MIN_CHUNK` tokens."""
    least = min(behind, MIN_CHUNK)
    fitting = int(slack / chunk_s * MIN_CHUNK) if chunk_s else MIN_CHUNK
    return min(behind, fitting, MAX_CHUNK) if fitting >= least else 0
