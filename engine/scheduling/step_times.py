"""Durations of steps: totals for metrics, and the latency model that is fitted to the steps of this worker.

`StepMeter` measures steps, `LatencyFit` fits the model, `LeastSquares` computes the fit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splitserve.histograms import DurationCounts
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency, attention_pairs

MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0
UNKNOWN_RETRY_S = 1.0
"""Retry hint while no prompt has been measured."""

StepKind = Literal["prefill", "decode"]
"""Steps that compute prompt tokens, beside output tokens or not, and steps that only decode."""
BATCH_BOUNDS = tuple(2**power for power in range(11))
"""Upper bounds of the buckets in which batch sizes are counted, in sequences."""


class StepPart(NamedTuple):
    """One sequence in a step: the tokens whose KV it has before the step, and the tokens that the step computes."""

    context_tokens: int
    new_tokens: int


class StepTokens(NamedTuple):
    """Tokens that a step computes. `pairs`: number of pairs of a prompt token and a key, see `attention_pairs`."""

    decodes: int
    decode_context_tokens: int
    """Tokens of the sequences that decode, their new ones included."""
    prompt_tokens: int
    pairs: float

    @classmethod
    def of(cls, parts: Sequence[StepPart]) -> StepTokens:
        """The size of a step with these parts. A part of one token decodes."""
        decodes = [part for part in parts if part.new_tokens == 1]
        prompts = [part for part in parts if part.new_tokens != 1]
        return cls(
            len(decodes),
            sum(part.context_tokens + 1 for part in decodes),
            sum(part.new_tokens for part in prompts),
            sum(attention_pairs(part.new_tokens, part.context_tokens) for part in prompts),
        )


@dataclass(slots=True)
class StepTotals:
    """Totals over all steps of one kind since the start. Written on the engine thread; any thread may read."""

    durations: DurationCounts = field(default_factory=DurationCounts)
    batches: list[int] = field(default_factory=lambda: [0] * (len(BATCH_BOUNDS) + 1))
    """Steps by batch size, within `BATCH_BOUNDS`; the last count is of larger ones."""
    sequences: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def record(self, parts: Sequence[StepPart], size: StepTokens, duration_s: float) -> None:
        """Counts a step."""
        self.durations.add(duration_s)
        self.batches[bisect_left(BATCH_BOUNDS, len(parts))] += 1
        self.sequences += len(parts)
        self.prompt_tokens += size.prompt_tokens
        self.output_tokens += size.decodes


TotalsByKind = Mapping[StepKind, StepTotals]


class StepMeter:
    """Measures steps: call `begin`, `expect` and `end` for each. Times are seconds of one clock.

    Requests also wait between consecutive steps, so a step's duration counts from the end of the one before. Only after
    the engine was idle does it count from its own beginning.
    """

    def __init__(self) -> None:
        self.latency = LatencyFit()
        self.totals: TotalsByKind = {"prefill": StepTotals(), "decode": StepTotals()}
        self._parts: Sequence[StepPart] = ()
        self._size = StepTokens(0, 0, 0, 0.0)
        self._busy_since_s: float | None = None
        self._began_s = 0.0

    def begin(self, now: float) -> None:
        """A step begins."""
        self._began_s = now if self._busy_since_s is None else self._busy_since_s

    @property
    def busy(self) -> bool:
        """Whether the next step follows the last one at once."""
        return self._busy_since_s is not None

    def rest(self) -> None:
        """The engine waits, for a grammar for example: this time is no part of the next step."""
        self._busy_since_s = None

    def expect(self, parts: Sequence[StepPart]) -> float | None:
        """Seconds that the step with these parts will take.

        None while its kind of work (decoding, prompts) has not been measured.
        """
        size, model = StepTokens.of(parts), self.latency.model
        self._parts, self._size = parts, size
        decode_s = model.decode_step_s(size.decodes, size.decode_context_tokens) if size.decodes else 0.0
        if decode_s is None or not size.prompt_tokens:
            return decode_s
        prefill = model.prefill
        return None if prefill is None else decode_s + prefill.seconds(size.prompt_tokens, size.pairs)

    def end(self, now: float, *, more: bool, is_first: bool = False) -> None:
        """The step ends. `more`: another one can follow at once. `is_first`: see `ModelRunner.prepared`; such a step is
        not fitted."""
        self._busy_since_s = now if more else None
        parts, self._parts, duration_s = self._parts, (), now - self._began_s
        if not parts:
            return
        size = self._size
        self.totals["prefill" if size.prompt_tokens else "decode"].record(parts, size, duration_s)
        if not is_first:
            self.latency.record(size, duration_s)

    def retry_after_s(self, waiting_tokens: int) -> float:
        """Seconds until a queue of `waiting_tokens` prompt tokens is computed."""
        wait_s = self.latency.model.prefill_s(waiting_tokens)
        return min(max(UNKNOWN_RETRY_S if wait_s is None else wait_s, MIN_RETRY_S), MAX_RETRY_S)


_DECODES_A_FIT = 16
"""Decode steps between fits: a fit costs more than a record."""
_PROMPTS_A_FIT = 4
"""Steps with prompts between fits: a decode worker has few."""


_LEAST_STEP_S, _LONGEST_STEP_S = 1e-6, 3600.0
"""Bounds of a step's duration. Beyond them the clock has jumped, or the machine was suspended."""
_LEAST_SHARE = 0.01
"""The share of the mean step that the price of a prompt token, and the base of a decode step, explain at least. Without
it noise could fit a price of nearly nothing."""


class LatencyFit:
    """Fits the latency model to steps, which are recorded one by one. Whatever durations are recorded, the model's
    figures are finite, not negative, and within the bounds of the durations."""

    def __init__(self) -> None:
        self.model = LatencyModel()
        """The latest fit. Each part is None until there were enough steps of its kind."""
        self._decodes, self._prompts = LeastSquares(), LeastSquares()
        self._num_decodes = self._num_prompts = 0
        self._seen: set[tuple[int, int]] = set()

    def record(self, size: StepTokens, duration_s: float) -> None:
        """Records a step that took `duration_s`. Ignores a time that is not finite and above 0."""
        # 1. A step that only decodes.
        if not size.prompt_tokens:
            self._record_decode(size, duration_s)
        # 2. A step that only computes prompts.
        elif not size.decodes:
            self._record_prompts(size, duration_s)
        # 3. A step of both: the prompts took the time beyond that of decoding, once decodes are measured.
        elif (decode_s := self.model.decode_step_s(size.decodes, size.decode_context_tokens)) is not None:
            self._record_prompts(size, duration_s - decode_s)

    def _record_decode(self, size: StepTokens, duration_s: float) -> None:
        if size.decodes < 1 or not 0 < duration_s < math.inf:
            return
        # A larger batch usually has more context, so the size alone makes the bucket.
        bucket = (size.decodes.bit_length(),)
        self._decodes.record(bucket, size.decodes, size.decode_context_tokens, _possible(duration_s))
        self._num_decodes += 1
        if self._num_decodes % _DECODES_A_FIT == 0:
            self.model = LatencyModel(self.model.prefill, self._fitted_decodes())

    def _record_prompts(self, size: StepTokens, duration_s: float) -> None:
        if not 0 < duration_s < math.inf:
            return
        bucket = size.prompt_tokens.bit_length(), int(size.pairs).bit_length() // 2
        if bucket not in self._seen:  # the first step of a size may have compiled kernels or captured a graph
            self._seen.add(bucket)
            return
        self._prompts.record(bucket, size.prompt_tokens, size.pairs, _possible(duration_s))
        self._num_prompts += 1
        if self._num_prompts % _PROMPTS_A_FIT == 0:
            self.model = LatencyModel(self._fitted_prompts(), self.model.decode)

    def _fitted_decodes(self) -> DecodeLatency:
        mean_s, _, _ = self._decodes.means()
        line = self._decodes.line(((1, 2), (1,), (2,)))
        if line is None:
            return DecodeLatency(mean_s)
        return DecodeLatency(max(line.base_s, _LEAST_SHARE * mean_s), line.first_s, line.second_s)

    def _fitted_prompts(self) -> PrefillLatency:
        mean_s, mean_tokens, _ = self._prompts.means()
        line = self._prompts.line(((1, 2), (1,)))
        # Chunks of one length determine no base. A line through the origin underestimates a short chunk by at most the
        # base, and never a long one.
        if line is None:
            return PrefillLatency(0.0, mean_s / mean_tokens)
        return PrefillLatency(
            line.base_s, max(line.first_s, _LEAST_SHARE * mean_s / mean_tokens), line.second_s
        )


def _possible(duration_s: float) -> float:
    """The nearest time that a step can take."""
    return min(max(duration_s, _LEAST_STEP_S), _LONGEST_STEP_S)


_Bucket = tuple[int, ...]
_MEMORY_STEPS = 64
"""Time constant of the decay, in steps of a bucket. In a younger bucket it is the age: first steps are slow."""
_MIN_SPREAD = 0.1
"""Standard deviation of an input over its mean, below which it gets no slope."""
_CORRELATED = 0.98
"""Correlation above which the inputs count as one."""
_OUTLIER = 3.0
"""A step counts as at most this multiple of the mean of its bucket: the process may have been stopped."""
_YOUNG_STEPS = 8
_OUTDONE = 1.5
"""In a bucket with fewer than `_YOUNG_STEPS` steps, a new step replaces earlier ones that took more than this multiple
of its time: they were slow for a passing reason, such as a cold cache."""
_HALF_LIFE_STEPS = 512
"""After this many steps of any size, a bucket that got none of them weighs half."""
_LEAST_WEIGHT = 1.0
"""Minimum weight of a bucket, in steps: other sizes may say nothing about it."""


class FittedLine(NamedTuple):
    """Seconds: base_s + first_s * the first input + second_s * the second. All at least 0."""

    base_s: float
    first_s: float
    second_s: float


class _Moments:
    """Decayed sums over steps: products of (1, first, second input) with each other and with the duration.

    Plain numbers, because arrays of nine would cost more than the rest of the measurement of a step.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 9
        self._steps = 0
        self.latest = 0
        """Number of this bucket's latest step, counted over all buckets."""

    def add(self, first: float, second: float, duration_s: float) -> None:
        self._steps += 1
        keep = 1 - 1 / min(self._steps, _MEMORY_STEPS)
        squares = (first * first, first * second, second * second)
        new = (1.0, first, second, *squares, duration_s, first * duration_s, second * duration_s)
        self._sums = [old * keep + term for old, term in zip(self._sums, new, strict=True)]

    def outdone_by(self, first: float, second: float, duration_s: float) -> bool:
        """Whether a step is so much faster than the few steps so far that they were slow for a passing reason."""
        weight, sum_first, sum_second = self._sums[:3]
        share = min(1.0, first * weight / sum_first, second * weight / sum_second if sum_second > 0 else 1.0)
        return self._steps < _YOUNG_STEPS and duration_s * _OUTDONE < self.mean_s * share

    @property
    def mean_s(self) -> float:
        return self._sums[6] / self._sums[0]

    @property
    def weight(self) -> float:
        return self._sums[0]

    @property
    def inputs(self) -> NDArray[np.float64]:
        weight, a, b, aa, ab, bb = self._sums[:6]
        return np.array(((weight, a, b), (a, aa, ab), (b, ab, bb)))

    @property
    def outputs(self) -> NDArray[np.float64]:
        return np.array(self._sums[6:])


class LeastSquares:
    """Sums by bucket, and the lines fitted to them. Call `means` and `line` only after the first `record`."""

    def __init__(self) -> None:
        self._buckets: dict[_Bucket, _Moments] = {}
        self._steps = 0

    def record(self, bucket: _Bucket, first: float, second: float, duration_s: float) -> None:
        """Records a step with these inputs, the first above 0, that took `duration_s`, above 0."""
        self._steps += 1
        moments = self._buckets.get(bucket)
        if moments is not None:
            duration_s = min(duration_s, _OUTLIER * moments.mean_s)
        if moments is None or moments.outdone_by(first, second, duration_s):
            moments = self._buckets[bucket] = _Moments()
        moments.add(first, second, duration_s)
        moments.latest = self._steps

    def means(self) -> tuple[float, float, float]:
        """The means of the duration and of both inputs, in this order."""
        inputs, outputs = self._sums()
        weight, first, second = (float(value) for value in inputs[0])
        return float(outputs[0]) / weight, first / weight, second / weight

    def line(self, allowed: Sequence[tuple[int, ...]]) -> FittedLine | None:
        """The line over the first of these sets of inputs (1, 2) whose slopes can be determined; None if there is none.

        Where the base would be below 0, the line goes through the origin. A set with a negative slope is skipped.
        """
        # Which inputs vary is judged by all steps, however long ago.
        telling = _telling(np.sum([moments.inputs for moments in self._buckets.values()], axis=0))
        inputs, outputs = self._sums()
        solved = (_solve(inputs, outputs, chosen) for chosen in allowed if chosen in telling)
        return next((line for line in solved if line is not None), None)

    def _sums(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        inputs, outputs = np.zeros((3, 3)), np.zeros(3)
        for moments in self._buckets.values():
            fading = 0.5 ** ((self._steps - moments.latest) / _HALF_LIFE_STEPS)
            share = max(fading, min(1.0, _LEAST_WEIGHT / moments.weight))
            inputs += share * moments.inputs
            outputs += share * moments.outputs
        return inputs, outputs


def _telling(inputs: NDArray[np.float64]) -> set[tuple[int, ...]]:
    """The sets of inputs that may have slopes, as columns of `inputs`."""
    means = inputs[0] / inputs[0, 0]
    covariance = inputs / inputs[0, 0] - np.outer(means, means)
    spread = [
        column
        for column in (1, 2)
        if means[column] > 0 and covariance[column, column] > (_MIN_SPREAD * means[column]) ** 2
    ]
    telling: set[tuple[int, ...]] = {(column,) for column in spread}
    if len(spread) == 2:
        correlation = covariance[1, 2] / np.sqrt(covariance[1, 1] * covariance[2, 2])
        if abs(correlation) < _CORRELATED:
            telling.add((1, 2))
    return telling


def _solve(
    inputs: NDArray[np.float64], outputs: NDArray[np.float64], chosen: tuple[int, ...]
) -> FittedLine | None:
    """Base and slopes, solved for these columns; None for a negative slope or a singular system."""
    for columns in ((0, *chosen), chosen):
        picked = list(columns)
        scale = np.sqrt(np.diag(inputs)[picked])
        matrix = inputs[np.ix_(picked, picked)] / np.outer(scale, scale)
        try:
            solution = np.linalg.solve(matrix, outputs[picked] / scale) / scale
        except np.linalg.LinAlgError:
            return None
        costs = dict(zip(picked, solution, strict=True))
        if not np.isfinite(solution).all() or any(costs[column] < 0 for column in chosen):
            return None
        if costs.get(0, 0.0) >= 0:
            return FittedLine(*(float(costs.get(column, 0.0)) for column in range(3)))
    return None
