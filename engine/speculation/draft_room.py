"""What drafts may cost the streams of a batch: by the token clock for those with a target, by a share for the others.

Pure: time is an argument, in seconds of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.pacing.token_clock import StreamPace, TokenClock
from engine.speculation.draft_lengths import NOTHING_OWED, Share

STEP_TIMES = 1.5
"""A step with drafts counts as so many times what it is predicted to take: nobody needs it to be that long."""
LEAST_SHARE = 0.97
"""A stream without a target gets at least this share of the tokens a second that it would have without drafts, over its
whole life here: what its own drafts gained it may lose by those of others."""
MAX_CREDIT = 16.0
"""Tokens of which a stream may be behind what it would have had, because it was ahead of that before."""


@dataclass(slots=True)
class StreamAccount:
    """What drafts brought a stream, its own and those of others, in tokens."""

    credit: float = 0.0

    def stepped(self, tokens: int, ratio: float) -> None:
        """It got so many tokens of a step that took as long as `ratio` plain ones. A plain one brings what it may lose
        in another."""
        self.credit = min(self.credit + tokens - LEAST_SHARE * ratio, MAX_CREDIT)


class DraftRoom:
    """The bounds of one step. `step_s`: seconds that it takes without drafts; 0: not measured."""

    def __init__(
        self, now: float, paces: Sequence[StreamPace | None], clock: TokenClock, step_s: float
    ) -> None:
        self._step_s = step_s
        # Where decoding alone misses a target, longer steps for more tokens may be what comes closest to it.
        self._kept = [None if pace is None or step_s >= pace.tpot_s else pace for pace in paces]
        self._margin = clock.margin.value
        due_s = min((clock.due_s(pace) for pace in self._kept if pace is not None), default=math.inf)
        self._longest_s = (due_s - now) / STEP_TIMES
        self._prompt_waits = clock.holds

    @property
    def longest(self) -> float:
        """Most plain steps that the step may take, so that nobody's next token is late even if all drafts are wrong."""
        if self._longest_s == math.inf:
            return math.inf
        return self._longest_s / self._step_s if self._step_s else 0.0

    @property
    def regained_s(self) -> float:
        """Seconds that the next step may take longer for each plain one before it."""
        owed_s = (1 / LEAST_SHARE - 1) * self._step_s
        return min(
            owed_s if pace is None else (self._margin * pace.tpot_s - self._step_s) / STEP_TIMES
            for pace in self._kept
        )

    def shares(self, accounts: Sequence[StreamAccount]) -> list[Share]:
        """What each stream is owed. Those with a target: nothing beyond their due times, unless a prompt waits for what
        is left before them: then the least that is left must not be expected to shrink."""
        if not self._prompt_waits:
            return [
                Share(LEAST_SHARE, account.credit) if pace is None else NOTHING_OWED
                for pace, account in zip(self._kept, accounts, strict=True)
            ]
        shares = []
        first_s = min((self._after_next_s(pace) for pace in self._kept if pace is not None), default=0.0)
        for pace, account in zip(self._kept, accounts, strict=True):
            if pace is None:
                shares.append(Share(LEAST_SHARE, account.credit))
                continue
            token_s = self._margin * pace.tpot_s
            spare_s = self._after_next_s(pace) - first_s
            shares.append(Share(self._step_s / token_s, (self._step_s + spare_s) / token_s - 1))
        return shares

    def _after_next_s(self, pace: StreamPace) -> float:
        """When the token after the next one is due, but for the longest gap."""
        return pace.first_s + self._margin * pace.tpot_s * (pace.tokens + 2)
