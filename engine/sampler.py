"""Chooses next tokens: a pure function of logits, parameters, seed and position.

A row's result never depends on the other rows: its one random number comes from a counter-based generator
over (seed, position), and its probabilities are summed in float64 in the order of token ids. So a sampled
request gives the same tokens in any batch, on any worker, and after a resume.

Order of operations: logit bias, repetition penalty, presence and frequency penalties, banned tokens and grammar,
temperature, top-k, top-p, min-p. Equal logits are ranked by token id, lower first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.cuda.draw import draw_tokens
from engine.grammar import GrammarFailedError, Mask
from engine.grammar import allowed_tokens as grammar_tokens
from engine.runner import RowsFailedError
from engine.types import SampledToken, SamplingParams, TokenLogprob

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_U64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_NUCLEUS_GUESS = 1024
"""Candidates sorted at first; nearly always enough for top-p or min-p, and much cheaper than all."""

_ROWS_AT_ONCE = 8
"""Rows that are widened to float32 together; few enough to stay in a core's cache."""
_ROUNDING = 1e-12
"""What sums of float64 probabilities may be off by; a sum this close to top-p has reached it."""


class NanLogitsError(RowsFailedError):
    """Rows whose logits hold NaN or infinity, so that any token would be made up."""

    default_reason = "NAN_LOGITS"


class SamplingRow(NamedTuple):
    """One row to sample. `token_ids[:prompt_tokens]` is the prompt, the rest up to `end` is output.

    `position`, which counts output tokens from 0, is `end - prompt_tokens`.
    """

    sampling: SamplingParams
    token_ids: Sequence[int]
    prompt_tokens: int
    end: int
    banned_token_ids: frozenset[int] = frozenset()
    mask: Mask | None = None
    """What the row's grammar allows."""

    @property
    def position(self) -> int:
        """Output position of the token to be chosen."""
        return self.end - self.prompt_tokens

    @property
    def penalized(self) -> bool:
        """Whether tokens seen so far change the logits."""
        s = self.sampling
        return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0

    @property
    def adjusted(self) -> bool:
        """Whether the logits are changed before a token is chosen."""
        changed = self.penalized or bool(self.sampling.logit_bias) or bool(self.banned_token_ids)
        return changed or self.mask is not None

    @property
    def plain(self) -> bool:
        """Whether nothing but the place of the largest logit is wanted."""
        return self.sampling.greedy and self.sampling.logprobs is None and not self.adjusted

    @property
    def drawable(self) -> bool:
        """Whether nothing but a token drawn from the logits as they are is wanted."""
        return not self.sampling.greedy and self.sampling.logprobs is None and not self.adjusted


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of its arguments only.

    SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), read at
    index `position` of the stream that starts at the mixed seed.
    """
    return (_mix(_mix(seed & _U64) + (position + 1) * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    state &= _U64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _U64
    return state ^ (state >> 31)


def sample(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    find_likeliest: Callable[[], list[int]] | None = None,
) -> list[SampledToken]:
    """Chooses one token a row. `logits` `[rows, vocabulary]`, any float dtype and device, left unchanged.

    `find_likeliest` waits for the place of each row's largest logit, -1 where that is not finite; None: look here.
    Raises NanLogitsError naming the rows whose logits are not finite at their maximum, GrammarFailedError naming
    those whose grammar allows nothing that the model can choose.
    """
    likeliest = _likeliest(logits) if find_likeliest is None else find_likeliest()
    if failed := tuple(row for row, token in enumerate(likeliest) if token < 0):
        raise NanLogitsError(f"logits of {len(failed)} of {len(rows)} sequences are not finite", failed)
    tokens = [SampledToken(token) for token in likeliest]
    others = [index for index, row in enumerate(rows) if not row.plain]
    if not logits.is_cpu:
        others = _draw_there(logits, rows, others, tokens)
    stuck: list[int] = []
    for index, source in zip(others, _on_host(logits, others), strict=True):
        token = _sample_row(source.float(), rows[index])
        if token is None:
            stuck.append(index)
        else:
            tokens[index] = token
    if stuck:
        raise GrammarFailedError("the grammar allows no token that the model can choose", tuple(stuck))
    return tokens


def _draw_there(
    logits: torch.Tensor, rows: Sequence[SamplingRow], wanted: list[int], tokens: list[SampledToken]
) -> list[int]:
    """Draws those of the wanted rows that nothing else is asked of, all at once on the logits' device.

    Replaces their tokens; returns the rows that are left.
    """
    drawn = [index for index in wanted if rows[index].drawable]
    if drawn:
        numbers = [uniform(rows[index].sampling.seed, rows[index].position) for index in drawn]
        found = draw_tokens(logits[drawn], [rows[index].sampling for index in drawn], numbers)
        for index, token in zip(drawn, found, strict=True):
            tokens[index] = SampledToken(token)
    return [index for index in wanted if not rows[index].drawable]


def _likeliest(logits: torch.Tensor) -> list[int]:
    """The first of each row's largest logits; -1 where that is not finite, which it is not in a row with a NaN."""
    found: list[int] = []
    if not logits.is_cpu:
        best, places = logits.max(dim=-1)
        found += torch.where(torch.isfinite(best), places, -1).tolist()
        return found
    # NumPy looks for the place of a maximum in many numbers at once, torch in one after the other.
    for part in logits.split(_ROWS_AT_ONCE):
        values = part.float().numpy()
        tokens = values.argmax(axis=1)
        finite = np.isfinite(values[np.arange(len(tokens)), tokens])
        found += np.where(finite, tokens, -1).tolist()
    return found


def _on_host(logits: torch.Tensor, rows: list[int]) -> Iterable[torch.Tensor]:
    """These rows one by one, from a GPU in one transfer."""
    return (logits[row] for row in rows) if logits.is_cpu or not rows else logits[rows].cpu()


def _sample_row(raw: torch.Tensor, row: SamplingRow) -> SampledToken | None:
    """The token of one row of float32 logits `[vocabulary]`, None when none can be chosen."""
    values = (adjust(raw, row) if row.adjusted else raw).numpy()
    token = int(values.argmax())
    if row.mask is not None and not math.isfinite(values[token]):
        return None
    if not row.sampling.greedy:
        token = _draw(values, row)
    top = row.sampling.logprobs
    return SampledToken(token, None if top is None else _logprobs(raw.numpy(), token, top))


def adjust(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """Logit bias, penalties and bans on a copy of one row's float32 logits `[vocabulary]`.

    The repetition penalty is CTRL's (arXiv:1909.05858, section 4.1) in the form that also lowers negative
    logits; presence and frequency penalties are OpenAI's.
    """
    s = row.sampling
    logits = logits.clone()
    if s.logit_bias:
        tokens, biases = zip(*s.logit_bias, strict=True)
        logits[list(tokens)] += torch.tensor(biases, dtype=logits.dtype)
    if s.repetition_penalty != 1.0:
        seen = torch.tensor(row.token_ids[: row.end], dtype=torch.long).unique()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and row.position:
        output = torch.tensor(row.token_ids[row.prompt_tokens : row.end], dtype=torch.long)
        tokens_seen, counts = output.unique(return_counts=True)
        logits[tokens_seen] -= s.presence_penalty + s.frequency_penalty * counts
    if row.mask is not None:
        allowed = torch.from_numpy(grammar_tokens(row.mask, logits.numel(), row.banned_token_ids))
        logits.masked_fill_(~allowed, float("-inf"))
    elif row.banned_token_ids:
        logits[list(row.banned_token_ids)] = float("-inf")
    return logits


def _draw(logits: NDArray[np.float32], row: SamplingRow) -> int:
    """Inverse transform sampling over the allowed tokens, in float64."""
    scaled = logits.astype(np.float64) / row.sampling.temperature
    allowed = allowed_tokens(scaled, row.sampling)
    kept = scaled if allowed is None else scaled[allowed]
    cumulative = torch.from_numpy(np.exp(kept - kept.max())).cumsum(0).numpy()
    target = uniform(row.sampling.seed, row.position) * cumulative[-1]
    # First index whose sum exceeds the target; tokens of probability zero are passed over. Rounding could
    # bring the target up to the last sum: then the last token that adds to it is meant.
    last = int(np.searchsorted(cumulative, cumulative[-1]))
    index = min(int(np.searchsorted(cumulative, target, side="right")), last)
    return index if allowed is None else int(allowed[index])


def allowed_tokens(scaled: Floats, sampling: SamplingParams) -> Ints | None:
    """Token ids, ascending, that top-k, top-p and min-p leave; None means all.

    `scaled`: float64 logits `[vocabulary]`, temperature applied. Each filter keeps a prefix of the ranking,
    so it is enough to count: top-p keeps the smallest prefix whose probability, among what top-k left, is
    at least p; min-p (arXiv:2407.01082) those at least min_p times as likely as the first.
    """
    size = scaled.size
    top_k = min(sampling.top_k or size, size)
    if top_k == size and sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return None
    width = min(top_k, _NUCLEUS_GUESS) if top_k == size else top_k
    ranked = _largest(scaled, width)
    total = _log_sum_exp(scaled if top_k == size else ranked)
    count = _count(ranked, total, sampling)
    if count == width < top_k:  # the prefix may be longer
        ranked = _largest(scaled, top_k)
        count = _count(ranked, total, sampling)
    return _first_ranked(scaled, ranked[:count])


def _count(values: Floats, total: float, sampling: SamplingParams) -> int:
    """Length of the prefix that top-p and min-p keep of descending logits; at least 1."""
    probabilities = np.exp(values - total)
    count = int(values.size)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum() - probabilities
        count = min(count, int((before < sampling.top_p - _ROUNDING).sum()))
    if sampling.min_p > 0.0:
        count = min(count, int((probabilities >= sampling.min_p * probabilities[0]).sum()))
    return max(count, 1)


def _log_sum_exp(values: Floats) -> float:
    largest = values.max()
    return float(largest + np.log(np.exp(values - largest).sum()))


def _largest(values: Floats, count: int) -> Floats:
    """The `count` largest values, descending."""
    rest = values.size - count
    return np.sort(np.partition(values, rest)[rest:] if rest else values)[::-1]


def _first_ranked(values: Floats, largest: Floats) -> Ints:
    """Indices, ascending, of the `largest` of these values, which descend; of equal ones the first."""
    places = np.flatnonzero(values >= largest[-1])
    surplus = places.size - largest.size
    if surplus:
        equal = np.flatnonzero(values[places] == largest[-1])
        places = np.delete(places, equal[-surplus:])
    return places


def _logprobs(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """Natural log-probabilities from raw logits: of the chosen token and of the `top` likeliest."""
    logprobs = logits.astype(np.float64)
    logprobs -= _log_sum_exp(logprobs)
    alternatives: list[tuple[int, float]] = []
    if top:
        tokens = _first_ranked(logprobs, _largest(logprobs, min(top, logprobs.size))).tolist()
        alternatives = [(candidate, float(logprobs[candidate])) for candidate in tokens]
        alternatives.sort(key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(token, float(logprobs[token]), tuple(alternatives))
