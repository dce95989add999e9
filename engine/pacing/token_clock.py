"""The token clock: when each stream's next token is due, and so how many prompt tokens fit before it.

A stream with a target of T seconds a token is to have its k-th token after the first T (m k + (1 - m) L) after that
one, with a margin m below 1: so its mean is at most T from its L-th token on, and later tokens gain on the target. Time
is an argument everywhere, in seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.pacing.step_time_fit import PromptFit

MAX_GAP_S = 0.5
"""No prompt keeps a stream without a token for longer than this, whatever it is ahead of its target."""
MIN_CHUNK_TOKENS = 32
"""Prompt tokens are granted in at least this many, or up to the end of the prompt: a step has a price of its own."""
HELD_S = 1.0
"""A prompt that got nothing for so long gets `MIN_CHUNK_TOKENS`, whatever is due."""
UNMEASURED_TOKENS = 64
"""Prompt tokens of a step beside streams with targets, while it is not known what prompts take."""
ALONE_EVERY = 4
"""One of so many steps decodes alone where that is believed to be late."""

_LEAST_SHARE = 0.1
"""Prompts count as slowed down by the streams beside them by ten times at most."""
_SHARE_OF_LATE_STREAMS = 0.5
"""What prompts get beside streams that decoding alone cannot keep in time; see `TokenClock.grant`."""

_ROUNDING_S = 1e-6
_MARGINS = 0.5, 0.95
_WINDOW_S = 10.0
_LATE_SHARE = 0.01
_BACK, _FORTH = 0.05, 0.01
"""The margin loses `_BACK` after a window with more than `_LATE_SHARE` late tokens, and gains `_FORTH` after others."""


@dataclass(frozen=True, slots=True)
class ServiceTargets:
    """What a client was promised. `tpot_s`: mean seconds a token after the first; `ttft_s`: seconds to the first one,
    which is due at `first_due_s` on the engine's clock. None and infinity: nothing."""

    tpot_s: float | None = None
    ttft_s: float | None = None
    first_due_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Crowd:
    """Steps that decode fewer streams than there are, seconds: only those with targets, and one alone."""

    paced_s: float
    single_s: float

    def crowds_out(self, tpot_s: float) -> bool:
        """Whether a target is missed because there are too many streams with targets; fewer of them would keep it."""
        return self.single_s < tpot_s <= self.paced_s

    def is_too_large(self, tpots_s: Sequence[float]) -> bool:
        """Whether that is so for most of these streams' targets: a few tight ones are not to hold up everybody."""
        return 2 * sum(map(self.crowds_out, tpots_s)) >= len(tpots_s)


@dataclass(slots=True)
class StreamPace:
    """Times of one stream's tokens here: its first, its latest, and how many came after the first."""

    tpot_s: float
    first_s: float
    last_s: float
    tokens: int = 0

    def emitted(self, now: float, tokens: int = 1) -> None:
        """So many tokens came."""
        self.last_s = now
        self.tokens += tokens


class ClockMargin:
    """The margin m, corrected by what comes late: fits may be wrong, and a step may take longer than any before."""

    def __init__(self) -> None:
        self.value = _MARGINS[1]
        self._since_s: float | None = None
        self._tokens = self._late = 0

    def record(self, now: float, tokens: int, late: int) -> None:
        """Counts tokens before which prompts were computed, and how many of them came `late`."""
        if self._since_s is None:
            self._since_s = now
        self._tokens += tokens
        self._late += late
        if now - self._since_s < _WINDOW_S:
            return
        change = -_BACK if self._late > _LATE_SHARE * self._tokens else _FORTH
        self.value = min(max(self.value + change, _MARGINS[0]), _MARGINS[1])
        self._since_s, self._tokens, self._late = now, 0, 0


class TokenClock:
    """Grants prompt tokens between the tokens of streams.

    As long as steps take what was predicted, no stream that decoding alone keeps in time comes late. Prompts are never
    held for ever: where a decode step takes less than m T, the time that is left adds up until a chunk fits into it,
    within `MAX_GAP_S`; otherwise `HELD_S` bounds the wait for the next chunk.
    """

    def __init__(self, answer_tokens: int = 0) -> None:
        """`answer_tokens` is L: answers with fewer tokens may miss their target. 0: none may."""
        self.margin = ClockMargin()
        self._answer_tokens = answer_tokens
        self._held_since_s: float | None = None
        self._mixed_steps = 0
        """Since the latest step that only decoded."""

    def due_s(self, stream: StreamPace) -> float:
        """When a stream's next token is due."""
        due_s = stream.first_s + stream.tpot_s * self._tokens_due(stream)
        return min(due_s, stream.last_s + MAX_GAP_S)

    def share_of_prompts(self, step_s: float, tpots_s: Sequence[float], crowd: Crowd) -> float:
        """The share of the time that streams with these targets leave to prompts."""
        tpot_s = min(tpots_s)
        if _is_lost(tpot_s, step_s, _if_too_large(crowd, tpots_s)):
            return _SHARE_OF_LATE_STREAMS
        return max(_LEAST_SHARE, 1 - step_s / (self.margin.value * tpot_s))

    def is_late(self, stream: StreamPace, now: float) -> bool:
        """Whether a stream's next token, which comes `now`, is later than its target has it, without the margin; of the
        first L ones, than it is due."""
        tokens = max(stream.tokens + 1, self._tokens_due(stream))
        return now > stream.first_s + stream.tpot_s * tokens

    def _tokens_due(self, stream: StreamPace) -> float:
        """In how many times its target a stream's next token is due after its first one: m k + (1 - m) L."""
        m = self.margin.value
        return m * (stream.tokens + 1) + (1 - m) * self._answer_tokens

    def grant(
        self,
        now: float,
        streams: Iterable[StreamPace],
        step_s: float,
        fit: PromptFit,
        *,
        remaining: int,
        context_tokens: int,
        mixed: bool = False,
        crowd: Crowd | None = None,
    ) -> int:
        """Prompt tokens that fit before the earliest token that is due, or 0: too few.

        `step_s` is the decode step that follows, or is `mixed` with them. The first prompt has `remaining` tokens after
        `context_tokens`. The grant may exceed that prompt.

        Where decoding alone misses a target whatever ends, holding prompts back saves nothing: beside such streams
        they get as long as a step, or the least chunk. That it misses may be wrong, so one step in `ALONE_EVERY`
        decodes alone there. Where it is a `crowd`, one that is too large, prompts wait until some streams have ended:
        each would add one.
        """
        streams = list(streams)
        crowd = _if_too_large(crowd, [stream.tpot_s for stream in streams])
        kept: list[StreamPace] = []
        lost: list[StreamPace] = []
        for stream in streams:
            (lost if _is_lost(stream.tpot_s, step_s, crowd) else kept).append(stream)
        if lost and self._mixed_steps >= ALONE_EVERY - 1:
            self._mixed_steps = 0
            return 0
        least = min(remaining, MIN_CHUNK_TOKENS)
        beside_s = step_s + (fit.mixing_s if mixed else 0.0)
        due_s = min((self.due_s(stream) for stream in kept), default=float("inf"))
        if lost:
            gap_s = max(2 * step_s, beside_s + fit.chunk_s(least, context_tokens) + _ROUNDING_S)
            due_s = min(due_s, min(stream.last_s for stream in lost) + min(gap_s, MAX_GAP_S))
        tokens = fit.tokens_within(min(due_s - now - beside_s, MAX_GAP_S), context_tokens)
        if tokens < least:
            if self._held_since_s is None:
                self._held_since_s = now
            if now - self._held_since_s < HELD_S:
                self._mixed_steps = 0
                return 0
            tokens = least
        self._held_since_s = None
        self._mixed_steps = self._mixed_steps + 1 if mixed else 0
        return tokens

    @property
    def holds(self) -> bool:
        """Whether a prompt waits for room."""
        return self._held_since_s is not None

    def nothing_waits(self) -> None:
        """No prompt is held any more."""
        self._held_since_s = None
        self._mixed_steps = 0


def _if_too_large(crowd: Crowd | None, tpots_s: Sequence[float]) -> Crowd | None:
    return crowd if crowd is not None and crowd.is_too_large(tpots_s) else None


def _is_lost(tpot_s: float, step_s: float, crowd: Crowd | None) -> bool:
    """Whether decoding alone misses a target, and would though streams of the `crowd`, if there is one, ended."""
    return step_s >= tpot_s and not (crowd and crowd.crowds_out(tpot_s))
