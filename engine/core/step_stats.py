"""Measures an engine's throughput over its recent steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.core.sequence import Sequence
from engine.core.types import EngineLoad
from engine.kv_cache.block_pool import BlockCounts
from engine.pacing.lent_effect import STEADY_S, LentEffect, SteadySpeed, speedup_of
from engine.pacing.step_time_fit import PromptTimeFit, StepTimeFit, pairs_of
from engine.pacing.token_clock import Crowd
from splitserve.histograms import DurationCounts

_DECAY = 0.9
_OUTLIER = 2.0
"""A step's duration counts as at most this multiple of the expected one. Otherwise a process that was stopped for a
minute during a step would look slow until it gets work again, and therefore get none."""
_MIN_TOKENS = 64
"""Prompt tokens that a prefill rate must rest on. A short prompt, above all a cold worker's first, takes nearly as long
as a long one: a rate known from it alone is far too low for admission to refuse by and the autoscaler to add workers.
"""
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0


class StepRates:
    """Exponential moving averages over steps; 0 until measured."""

    def __init__(self) -> None:
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._measured_tokens = 0
        self._decode_step_s = 0.0

    def record(self, prefill_tokens: int, duration_s: float) -> None:
        """Records a step of `duration_s` seconds; without prefill tokens it only decoded."""
        if duration_s <= 0:
            return
        if prefill_tokens:
            if rate := self.prefill_tokens_per_s:
                duration_s = min(duration_s, _OUTLIER * prefill_tokens / rate)
            # Tokens and seconds are averaged separately, so that a short chunk weighs little.
            self._prefill_tokens = self._prefill_tokens * _DECAY + prefill_tokens
            self._prefill_s = self._prefill_s * _DECAY + duration_s
            self._measured_tokens += prefill_tokens
        elif self._decode_step_s:
            duration_s = min(duration_s, _OUTLIER * self._decode_step_s)
            self._decode_step_s += (duration_s - self._decode_step_s) * (1 - _DECAY)
        else:
            self._decode_step_s = duration_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed per second, over the steps that had any; 0 before there were `_MIN_TOKENS`."""
        return self._prefill_tokens / self._prefill_s if self._measured_tokens >= _MIN_TOKENS else 0.0

    @property
    def decode_step_s(self) -> float:
        """Seconds of a step that only decodes; of one with drafts, for each token that a sequence got on average."""
        return self._decode_step_s

    def retry_after_s(self, waiting_tokens: int) -> float:
        """Seconds until a queue of `waiting_tokens` prompt tokens is computed; 1 while unmeasured."""
        rate = self.prefill_tokens_per_s
        return min(max(waiting_tokens / rate if rate else 1.0, _MIN_RETRY_S), _MAX_RETRY_S)


class LentSpeed:
    """How much faster prompts have been of late by cores that neighbours lent: a moving mean over steps."""

    def __init__(self) -> None:
        self._took_s = self._alone_s = 0.0

    def record(self, duration_s: float, speedup: float) -> None:
        """Records a step that only computed prompts, in `speedup` times less time than alone."""
        self._took_s = self._took_s * _DECAY + duration_s
        self._alone_s = self._alone_s * _DECAY + duration_s * speedup

    @property
    def value(self) -> float:
        """At least 1."""
        return max(1.0, self._alone_s / self._took_s) if self._took_s > 0 else 1.0


class DraftOutcome(NamedTuple):
    """What became of a draft: its tokens, and how many of them, from the first on, were the ones sampled."""

    drafted: int
    accepted: int


NO_DRAFTS: Mapping[Sequence, DraftOutcome] = {}
StepKind = Literal["prefill", "decode"]
"""Steps that compute prompt tokens, beside output tokens or not, and those that only decode."""
BATCH_BOUNDS = tuple(2**power for power in range(11))
"""Upper bounds of the buckets in which batch sizes are counted, in sequences."""


@dataclass(slots=True)
class StepTotals:
    """Totals over all steps of one kind since the start. Written on the engine thread; any thread may read."""

    durations: DurationCounts = field(default_factory=DurationCounts)
    batches: list[int] = field(default_factory=lambda: [0] * (len(BATCH_BOUNDS) + 1))
    """Steps by batch size, within `BATCH_BOUNDS`; the last count is of larger ones."""
    sequences: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Rows of output; those of drafts among them."""
    context_tokens: int = 0
    """Tokens of which KV was read, added up over the sequences of each step."""
    lent_steps: int = 0
    """Steps that neighbours lent cores to."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted tokens that were the ones sampled."""

    def record(
        self, prompt_tokens: int, output_tokens: int, num_new: Mapping[Sequence, int], s: float
    ) -> None:
        """Counts a step of `s` seconds that computed `num_new` tokens of each sequence."""
        self.durations.add(s)
        self.batches[bisect_left(BATCH_BOUNDS, len(num_new))] += 1
        self.sequences += len(num_new)
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.context_tokens += sum(sequence.num_computed for sequence in num_new)


@dataclass(frozen=True, slots=True)
class StepWork:
    """What steps of a model ask of its device, by the shapes of its linear layers. Attention's products, norms and
    activations are left out; what caches hold is not known."""

    weight_bytes: int
    """Read once a step."""
    layer_weights: int
    """Elements that each token is multiplied with."""
    output_weights: int
    """Elements of the output layer, which only tokens that are sampled from need."""
    kv_token_bytes: int
    """KV of a token, in all layers."""

    def read_bytes(self, totals: StepTotals) -> int:
        """Bytes of weights and KV that these steps read."""
        return self.weight_bytes * totals.durations.total + self.kv_token_bytes * totals.context_tokens

    def flops(self, totals: StepTotals) -> int:
        """Floating-point operations of linear layers; a prompt's one row of the output layer is left out."""
        tokens = totals.prompt_tokens + totals.output_tokens
        return 2 * (self.layer_weights * tokens + self.output_weights * totals.output_tokens)


TotalsByKind = Mapping[StepKind, StepTotals]


class StepMeter:
    """Measures steps; call `begin` and `end` around each. Times are seconds of one clock.

    Requests also wait between consecutive steps, so a step's duration counts from the end of the one before. Only after
    the engine was idle does it count from its own beginning.
    """

    def __init__(self) -> None:
        self.rates = StepRates()
        self.fit = StepTimeFit()
        self.prompt_fit = PromptTimeFit()
        self.lent, self.steady = LentSpeed(), SteadySpeed()
        self._lends, self._effects = False, (LentEffect(), LentEffect())
        self._compute = 1.0
        """What the latest step had, over what the worker has itself."""
        self.totals: TotalsByKind = {"prefill": StepTotals(), "decode": StepTotals()}
        self._busy_since_s: float | None = None
        self._began_s = self._guessing_s = self._ended_s = 0.0

    @property
    def decode_speed(self) -> float:
        """How many times as fast as by `fit` the next steps are taken to be: as of late, and no faster than what the
        latest step had of lent cores can make one."""
        return min(self.steady.lower, speedup_of(self._compute, self._effects[False].share))

    @property
    def prompt_speed(self) -> float:
        """The same of `prompt_fit`."""
        return min(self.lent.value, speedup_of(self._compute, self._effects[True].share))

    def decode_steps(self, decodes: Iterable[Sequence], joining: int = 0) -> tuple[float, Crowd] | None:
        """Seconds of a step that only decodes these and so many that join, and of steps of fewer; None before any was
        measured."""
        if (fit := self.fit.latest) is None:
            return None
        running = paced = joining
        context = paced_context = 0
        for sequence in decodes:
            running += 1
            context += sequence.num_computed
            if sequence.pace is not None:
                paced += 1
                paced_context += sequence.num_computed
        single_s, speed = fit.step_s(1, context // max(1, running)), self.decode_speed
        crowd = Crowd(fit.step_s(paced, paced_context) / speed, min(single_s, self.fit.least_s) / speed)
        return fit.step_s(running, context) / speed, crowd

    def expected_s(self, num_new: Mapping[Sequence, int]) -> float | None:
        """The time that a step will take which computes `num_new` tokens of each sequence; None before any was measured
        that decodes, or computes prompts, as this one does.
        """
        decoding = sum(1 for tokens in num_new.values() if tokens == 1)
        prefill_tokens = sum(num_new.values()) - decoding
        rates = self.rates
        if (decoding and not rates.decode_step_s) or (prefill_tokens and not rates.prefill_tokens_per_s):
            return None
        return rates.decode_step_s + (prefill_tokens / rates.prefill_tokens_per_s if prefill_tokens else 0.0)

    def begin(self, now: float) -> None:
        """A step begins."""
        if now - self._ended_s > STEADY_S[-1]:
            self.steady = SteadySpeed()  # what was lent before says nothing any more
        self._began_s = now if self._busy_since_s is None else self._busy_since_s

    def guessed(self, seconds: float) -> None:
        """A draft model computed for so long within the step that has begun."""
        self._guessing_s = seconds

    def end(
        self,
        now: float,
        num_new: Mapping[Sequence, int],
        more: bool,
        speedup: float = 1.0,
        drafts: Mapping[Sequence, DraftOutcome] = NO_DRAFTS,
        *,
        is_first: bool = False,
    ) -> float:
        """A step ends that computed `num_new` tokens of each sequence, and drafted ones; `more`: another can follow at
        once. Returns how long it took.

        To the fit of decode steps a drafted token is one more row over its sequence's context, as it is to the device;
        the time that a draft model took before is no part of it.
        Fits are of what the worker can do alone: a step that had `speedup` times as much compute counts for as much
        longer as `LentEffect` has it. `is_first`: see `ModelRunner.prepared`; no fit and no rate counts such a step.
        """
        self._busy_since_s, self._ended_s = now if more else None, now
        duration_s = now - self._began_s
        if not num_new:
            return duration_s
        decoding = sum(1 for tokens in num_new.values() if tokens == 1)
        prefill_tokens = sum(num_new.values()) - decoding
        drafted = sum(draft.drafted for draft in drafts.values())
        accepted = sum(draft.accepted for draft in drafts.values())
        totals = self.totals["prefill" if prefill_tokens else "decode"]
        totals.record(prefill_tokens, decoding + drafted, num_new, duration_s)
        totals.lent_steps += speedup > 1
        totals.drafted_tokens += drafted
        totals.accepted_tokens += accepted
        own_s = max(0.0, duration_s - self._guessing_s)
        self._guessing_s = 0.0
        if is_first:
            return duration_s
        self.rates.record(
            prefill_tokens, duration_s * decoding / (decoding + accepted) if drafts else duration_s
        )
        self._compute = speedup
        if speedup != 1 or self._lends:
            self._lends = True
            speedup = self._measured_speedup(prefill_tokens, decoding + drafted, duration_s, speedup)
            if not prefill_tokens:
                self.steady.record(duration_s, speedup)
        if prefill_tokens:
            self.lent.record(duration_s, speedup)
        self._fit_parts(num_new, prefill_tokens, decoding + drafted, own_s * speedup, drafts)
        return duration_s

    def load(
        self,
        counts: BlockCounts,
        running: Collection[Sequence],
        waiting_requests: int,
        waiting_tokens: int,
        late_prompts: int,
        *,
        shares_cores: bool = False,
    ) -> EngineLoad:
        """The load of an engine with these blocks and requests, and its measured rates. Costs O(running)."""
        unread = [sequence.remaining for sequence in running if sequence.remaining > 1]
        prompts = sum(unread)
        return EngineLoad(
            waiting_requests=waiting_requests,
            running_requests=len(running),
            waiting_tokens=waiting_tokens + prompts,
            total_blocks=counts.total,
            free_blocks=counts.free,
            reserved_blocks=counts.reserved,
            quarantined_blocks=counts.quarantined,
            referenced_blocks=counts.referenced,
            kept_blocks=counts.kept,
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            decode_step_s=self.rates.decode_step_s,
            step_fit=self.fit.latest,
            prompt_fit=self.prompt_fit.latest,
            late_prompts=late_prompts if prompts or waiting_tokens else 0,
            streams=len(running) - len(unread),
            lent_speedup=self.lent.value if shares_cores else 0.0,
            decode_speedup=self.steady.value if shares_cores else 0.0,
        )

    def _measured_speedup(self, prefill_tokens: int, rows: int, duration_s: float, compute: float) -> float:
        size = prefill_tokens.bit_length(), rows.bit_length()
        effect = self._effects[prefill_tokens > 0]
        return effect.speedup(size, duration_s / max(1, prefill_tokens), compute)

    def _fit_parts(
        self,
        num_new: Mapping[Sequence, int],
        prefill_tokens: int,
        decoding: int,
        duration_s: float,
        drafts: Mapping[Sequence, DraftOutcome],
    ) -> None:
        context, pairs = 0, 0.0
        for sequence, tokens in num_new.items():
            if tokens == 1:
                rows = 1 + drafts[sequence].drafted if sequence in drafts else 1
                context += rows * sequence.num_computed
            else:
                # What was computed before; unknown, and taken for nothing, where the request ended and gave up its KV.
                pairs += pairs_of(tokens, max(0, sequence.num_computed - tokens))
        if not prefill_tokens:
            self.fit.record(decoding, context, duration_s)
        elif not decoding:
            self.prompt_fit.record(prefill_tokens, pairs, duration_s)
        elif (decode_fit := self.fit.latest) is not None:
            decode_s = decode_fit.step_s(decoding, context)
            self.prompt_fit.record_mixed(prefill_tokens, pairs, decode_s, duration_s)
