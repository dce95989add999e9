"""Chooses next tokens: a pure function of logits, parameters, seed and position.

A row's result never depends on the other rows: its one random number comes from a counter-based generator
over (seed, position), and its probabilities are summed in float64 in the order of token ids. So a sampled
request gives the same tokens in any batch, on any worker, and after a resume.

Order of operations: logit bias, repetition penalty, presence and frequency penalties, banned tokens and grammar,
temperature, top-k, top-p, min-p. Equal logits are ranked by token id, lower first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.grammar import GrammarFailedError, Mask
from engine.grammar import allowed_tokens as grammar_tokens
from engine.runner import RowsFailedError
from engine.types import SampledToken, SamplingParams, TokenLogprob

_U64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_NUCLEUS_GUESS = 1024
"""Candidates sorted at first; nearly always enough for top-p or min-p, and much cheaper than all."""

_ROUNDING = 1e-12
"""What sums of float64 probabilities may be off by; a sum this close to top-p has reached it."""


class NanLogitsError(RowsFailedError):
    """Rows whose logits hold NaN or infinity, so that any token would be made up."""

    default_reason = "NAN_LOGITS"


@dataclass(frozen=True, slots=True)
class SamplingRow:
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


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Chooses one token a row. `logits` `[rows, vocabulary]`, any float dtype and device, left unchanged.

    Raises NanLogitsError naming the rows whose logits are not finite at their maximum, GrammarFailedError naming
    those whose grammar allows nothing that the model can choose.
    """
    best, greedy = logits.max(dim=-1)
    finite = torch.isfinite(best).tolist()
    if not all(finite):
        failed = tuple(row for row, ok in enumerate(finite) if not ok)
        raise NanLogitsError(f"logits of {len(failed)} of {len(rows)} sequences are not finite", failed)
    likeliest: list[int] = greedy.tolist()
    tokens: list[SampledToken] = []
    stuck: list[int] = []
    for index, row in enumerate(rows):
        token = _sample_row(logits[index], row, likeliest[index])
        if token is None:
            stuck.append(index)
        else:
            tokens.append(token)
    if stuck:
        raise GrammarFailedError("the grammar allows no token that the model can choose", tuple(stuck))
    return tokens


def _sample_row(logits: torch.Tensor, row: SamplingRow, likeliest: int) -> SampledToken | None:
    """The row's token, None when none can be chosen."""
    wants_logprobs = row.sampling.logprobs is not None
    if row.sampling.greedy and not row.adjusted and not wants_logprobs:
        return SampledToken(likeliest)
    raw = logits.to("cpu", torch.float32)
    adjusted = adjust(raw, row) if row.adjusted else raw
    if row.mask is not None and not torch.isfinite(adjusted.max()):
        return None
    token = int(adjusted.argmax()) if row.sampling.greedy else _draw(adjusted, row)
    return SampledToken(token, _logprobs(raw, token, row.sampling.logprobs) if wants_logprobs else None)


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


def _draw(logits: torch.Tensor, row: SamplingRow) -> int:
    """Inverse transform sampling over the allowed tokens, in float64."""
    scaled = logits.double() / row.sampling.temperature
    allowed = allowed_tokens(scaled, row.sampling)
    kept = scaled if allowed is None else scaled[allowed]
    cumulative = torch.exp(kept - kept.max()).cumsum(0)
    target = uniform(row.sampling.seed, row.position) * cumulative[-1:]
    # First index whose sum exceeds the target; tokens of probability zero are passed over. Rounding could
    # bring the target up to the last sum: then the last token that adds to it is meant.
    last = torch.searchsorted(cumulative, cumulative[-1:])
    index = int(torch.minimum(torch.searchsorted(cumulative, target, right=True), last).item())
    return index if allowed is None else int(allowed[index])


def allowed_tokens(scaled: torch.Tensor, sampling: SamplingParams) -> torch.Tensor | None:
    """Token ids, ascending, that top-k, top-p and min-p leave; None means all.

    `scaled`: float64 logits `[vocabulary]`, temperature applied. Each filter keeps a prefix of the ranking,
    so it is enough to count: top-p keeps the smallest prefix whose probability, among what top-k left, is
    at least p; min-p (arXiv:2407.01082) those at least min_p times as likely as the first.
    """
    size = scaled.numel()
    top_k = min(sampling.top_k or size, size)
    if top_k == size and sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return None
    if top_k == size:
        total = torch.logsumexp(scaled, 0)
        width = min(_NUCLEUS_GUESS, size)
        count = _count(torch.topk(scaled, width).values, total, sampling)
        if count == width < size:  # the prefix may be longer
            count = _count(torch.sort(scaled, descending=True).values, total, sampling)
    else:
        values = torch.topk(scaled, top_k).values
        count = _count(values, torch.logsumexp(values, 0), sampling)
    return _first_ranked(scaled, count)


def _count(values: torch.Tensor, total: torch.Tensor, sampling: SamplingParams) -> int:
    """Length of the prefix that top-p and min-p keep of descending logits; at least 1."""
    probabilities = torch.exp(values - total)
    count = int(values.numel())
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities
        count = min(count, int((before < sampling.top_p - _ROUNDING).sum()))
    if sampling.min_p > 0.0:
        count = min(count, int((probabilities >= sampling.min_p * probabilities[0]).sum()))
    return max(count, 1)


def _first_ranked(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices, ascending, of the `count` largest values; of equal ones the first."""
    threshold = torch.topk(values, count).values[-1]
    above = (values > threshold).nonzero().squeeze(1)
    equal = (values == threshold).nonzero().squeeze(1)[: count - above.numel()]
    return torch.cat([above, equal]).sort().values


def _logprobs(logits: torch.Tensor, token: int, top: int | None) -> TokenLogprob:
    """Natural log-probabilities from raw logits: of the chosen token and of the `top` likeliest."""
    logprobs = torch.log_softmax(logits.double(), 0)
    alternatives: list[tuple[int, float]] = []
    if top:
        tokens = _first_ranked(logprobs, min(top, logprobs.numel())).tolist()
        alternatives = [(candidate, float(logprobs[candidate])) for candidate in tokens]
        alternatives.sort(key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(token, float(logprobs[token]), tuple(alternatives))
