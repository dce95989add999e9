"""Draws the tokens of many rows at once, on the device that has their logits.

Computes the same function as `engine.runner.sampler` does row by row on the host, with the same random numbers. Float64
sums may differ in their last bits, so about one draw in 10^12 gives a neighbouring token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engine.core.types import SamplingParams

GUESS = 1024
"""Candidates ranked at first; nearly always enough for top-p or min-p, and much cheaper than ranking all."""
_ROUNDING = 1e-12


def draw_tokens(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    """One token per row of `logits` `[rows, vocabulary]`, int64 `[rows]`: temperature, top-k, top-p and min-p, then
    inverse transform sampling over the allowed tokens, in the order of their ids.

    `uniforms`: each row's random number in [0, 1). Waits for the device where rows have filters. Makes several float64
    copies of the logits.
    """
    numbers = torch.tensor(
        [(s.temperature, u) for s, u in zip(sampling, uniforms, strict=True)], dtype=torch.float64
    ).to(logits.device)
    scaled = logits.double() / numbers[:, :1]
    weights = torch.exp(scaled - scaled.amax(-1, keepdim=True))
    if any(s.top_k or s.top_p < 1.0 or s.min_p > 0.0 for s in sampling):
        weights = weights.masked_fill(~_allowed(scaled, sampling), 0.0)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    # Rounding may bring the target up to the last sum; the token is then the last one with a weight.
    last = torch.searchsorted(cumulative, total)
    chosen = torch.searchsorted(cumulative, numbers[:, 1:] * total, right=True)
    return torch.minimum(chosen, last).squeeze(1)


def _allowed(scaled: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """The tokens that pass the filters, bool `[rows, vocabulary]`, from float64 logits with temperature applied.

    Each filter keeps a prefix of the ranking, so counting suffices. Of equal logits the lower token id ranks higher.
    """
    size = scaled.shape[-1]
    for width in _widths(size, sampling):
        ranked = scaled.topk(width).values
        count = _count(scaled, ranked, sampling)
        # A prefix that fills the guess may be longer.
        if width == size or not bool((count == width).any()):
            break
    threshold = ranked.gather(1, count - 1)
    above, equal = scaled > threshold, scaled == threshold
    ties_kept = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= ties_kept))


def _widths(size: int, sampling: Sequence[SamplingParams]) -> Iterator[int]:
    # One more than any top-k keeps, so that a full top-k does not look like a guess that was too small.
    yield min(size, max(GUESS, *(1 + (s.top_k or 0) for s in sampling)))
    yield size


def _count(scaled: torch.Tensor, ranked: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """Length of the prefix that top-k, top-p and min-p keep of `ranked` `[rows, width]`; int64 `[rows, 1]`, at least 1.

    As `engine.runner.sampler.allowed_tokens` defines them.
    """
    size, width = scaled.shape[-1], ranked.shape[-1]
    table = [(s.top_k or size, s.top_p - _ROUNDING if s.top_p < 1.0 else 2.0, s.min_p) for s in sampling]
    limits = torch.tensor(table, dtype=torch.float64).to(scaled.device)
    top_k, top_p, min_p = limits.split(1, dim=-1)
    within = torch.arange(width, device=scaled.device) < top_k
    of_all = scaled.logsumexp(-1, keepdim=True)
    of_first = ranked.masked_fill(~within, float("-inf")).logsumexp(-1, keepdim=True)
    probabilities = torch.exp(ranked - torch.where(top_k < size, of_first, of_all))
    before = probabilities.cumsum(-1) - probabilities
    kept = within & (before < top_p) & (probabilities >= min_p * probabilities[:, :1])
    return kept.sum(-1, keepdim=True).clamp(min=1)
