"""The time of steps, fitted: of those that decode, and of chunks of prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.pacing.two_slope_fit import FittedLine, TwoSlopeFit

_FIT_EVERY_STEPS = 16
"""Steps between fits, unless one displaces what was known of its kind."""
_FEW = 2
_LEAST_SHARE = 1 / 16
"""Weight of a step of at most `_FEW` sequences in `StepTimeFit.least_s`, if it took longer."""


@dataclass(frozen=True, slots=True)
class DecodeStepFit:
    """Seconds of a step that only decodes: base_s + sequence_s * sequences + context_token_s * their KV tokens."""

    base_s: float
    sequence_s: float
    context_token_s: float

    def step_s(self, sequences: int, context_tokens: int) -> float:
        """Seconds of a step of so many sequences that have so many tokens together."""
        return self.base_s + self.sequence_s * sequences + self.context_token_s * context_tokens


class StepTimeFit:
    """Takes decode-only steps one by one; fits every _FIT_EVERY_STEPS steps, because a fit costs more than a record.

    Buckets are batch sizes, in powers of two. A larger batch usually has more context.
    """

    def __init__(self) -> None:
        self.latest: DecodeStepFit | None = None
        """The latest fit, all costs at least 0; None until there is one."""
        self.least_s = math.inf
        """The shortest step, whatever its size: one sequence alone takes no longer. Only steps of few show that this
        has become wrong; those of many may take longer for their number, though a line through them have no slope."""
        self._sums = TwoSlopeFit(forgets_slow=True)
        self._steps = 0

    def record(self, sequences: int, context_tokens: int, duration_s: float) -> None:
        """Records a step of `sequences` sequences that have `context_tokens` tokens together."""
        if sequences < 1 or duration_s <= 0:
            return
        if duration_s < self.least_s:
            self.least_s = duration_s
        elif sequences <= _FEW:
            self.least_s += (duration_s - self.least_s) * _LEAST_SHARE
        displaces = self._sums.record((sequences.bit_length(),), sequences, context_tokens, duration_s)
        self._steps += 1
        if self._steps % _FIT_EVERY_STEPS == 0 or (displaces and self.latest is not None):
            self.refit()

    def refit(self) -> None:
        """Fits what was recorded, at least one step."""
        self.latest = self._fit()

    def _fit(self) -> DecodeStepFit:
        line = self._sums.line(((1, 2), (1,), (2,)))
        if line is None:
            return DecodeStepFit(self._sums.means()[0], 0.0, 0.0)
        return DecodeStepFit(*line)


_FIT_EVERY_CHUNKS = 4
"""Chunks between fits: a decode worker sees few."""
_LEAST_MIXED = 16
"""Mixed steps before what a chunk adds to one is fitted."""
_MIXING_SHARE = 0.1
"""Weight of a mixed step in the mean of what mixing costs."""
_MIXING_OUTLIER = 3.0
"""A mixed step counts as at most this multiple of its parts: the process may have been stopped."""


def pairs_of(tokens: int, context_tokens: int) -> float:
    """Pairs of a token and a key in a chunk of `tokens` after `context_tokens` that are computed."""
    return tokens * (context_tokens + tokens / 2)


def _bucket(tokens: int, pairs: float) -> tuple[int, int]:
    return tokens.bit_length(), int(pairs).bit_length() // 2


@dataclass(frozen=True, slots=True)
class PromptFit:
    """Seconds of a step that only computes prompts: base_s + token_s * tokens + pair_s * `pairs_of` its chunks.

    `token_s` is above 0. For a whole prompt of n tokens the pairs are n^2 / 2. `mixing_s` is what a step that also
    decodes takes beyond the sum of both parts, at least -base_s: one that reads the weights once for both is shorter.
    """

    base_s: float
    token_s: float
    pair_s: float
    mixing_s: float = 0.0

    def chunk_s(self, tokens: int, context_tokens: int) -> float:
        """Seconds of a chunk of `tokens` after `context_tokens` that are computed; 0 for no tokens."""
        if tokens == 0:
            return 0.0
        return self.base_s + self.token_s * tokens + self.pair_s * pairs_of(tokens, context_tokens)

    def faster(self, speed: float) -> PromptFit:
        """The fit of a worker that is `speed` times as fast."""
        if speed == 1:
            return self
        return PromptFit(
            self.base_s / speed, self.token_s / speed, self.pair_s / speed, self.mixing_s / speed
        )

    def joins(self, tokens: int, before: int, behind: int) -> bool:
        """Whether so many tokens of one more prompt pay in a step that has `before` prompts: these wait for it, and
        `behind` prompts, itself included, are spared what a step takes beside its tokens."""
        return tokens * self.token_s * before <= self.base_s * behind

    def tokens_within(self, seconds: float, context_tokens: int) -> int:
        """The longest chunk after `context_tokens` that takes at most `seconds`."""
        left = seconds - self.base_s
        if left <= 0:
            return 0
        # pair_s / 2 n^2 + each n = left, solved for n without cancellation.
        each = self.token_s + self.pair_s * context_tokens
        return int(2 * left / (each + math.sqrt(each * each + 2 * self.pair_s * left)))


def _line(sums: TwoSlopeFit) -> FittedLine:
    line = sums.line(((1, 2), (1,)))
    if line is None or line.first_s <= 0:
        # Chunks of one length tell no base: through the origin, which takes a short chunk for too cheap by at most the
        # base, and never a long one.
        mean_s, mean_tokens, _ = sums.means()
        return FittedLine(0.0, mean_s / mean_tokens, 0.0)
    return line


class PromptTimeFit:
    """Takes steps that compute prompts one by one. Buckets are tokens and pairs, in powers of two and four."""

    def __init__(self) -> None:
        self.latest: PromptFit | None = None
        """The latest fit; None until there is one."""
        self.beside: PromptFit | None = None
        """What chunks add to steps that also decode; None until enough such steps are measured. Where prompts nearly
        always come beside decodes, `latest` stays what few steps once told."""
        self._sums, self._beside = TwoSlopeFit(), TwoSlopeFit()
        self._mixed = 0
        self._seen: set[tuple[int, ...]] = set()
        self._steps = 0
        self._mixing_s = 0.0

    def record(self, tokens: int, pairs: float, duration_s: float) -> None:
        """Records a step that only computes chunks of prompts, `tokens` and `pairs` together.

        The first step of a size counts for nothing: it may have compiled kernels or captured a graph.
        """
        if tokens < 1 or duration_s <= 0:
            return
        bucket = _bucket(tokens, pairs)
        if bucket not in self._seen:
            self._seen.add(bucket)
            return
        self._sums.record(bucket, tokens, pairs, duration_s)
        self._steps += 1
        if self._steps % _FIT_EVERY_CHUNKS == 0:
            self.latest = self._fit()

    def record_mixed(self, tokens: int, pairs: float, decode_s: float, duration_s: float) -> None:
        """Records a step that computes chunks beside decodes, which alone take `decode_s`. Until there were steps that
        only compute chunks, what these add is the fit."""
        if tokens < 1 or duration_s <= 0:
            return
        fit = self.latest
        if fit is None or not self._steps:
            self._record_beside(tokens, pairs, duration_s - decode_s)
            self.latest = self.beside
            return
        parts_s = fit.base_s + fit.token_s * tokens + fit.pair_s * pairs + decode_s
        taken_s = min(duration_s, _MIXING_OUTLIER * parts_s)
        self._record_beside(tokens, pairs, taken_s - decode_s)
        self._mixing_s += (taken_s - parts_s - self._mixing_s) * _MIXING_SHARE
        self.latest = self._with_mixing(fit.base_s, fit.token_s, fit.pair_s)

    def _record_beside(self, tokens: int, pairs: float, added_s: float) -> None:
        if added_s <= 0:
            return
        self._beside.record(_bucket(tokens, pairs), tokens, pairs, added_s)
        self._mixed += 1
        if self._mixed >= _LEAST_MIXED and self._mixed % _FIT_EVERY_CHUNKS == 0:
            self.beside = PromptFit(*_line(self._beside))

    def _fit(self) -> PromptFit:
        return self._with_mixing(*_line(self._sums))

    def _with_mixing(self, base_s: float, token_s: float, pair_s: float) -> PromptFit:
        return PromptFit(base_s, token_s, pair_s, max(self._mixing_s, -base_s))
