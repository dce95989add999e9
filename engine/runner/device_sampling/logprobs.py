"""Log-probabilities of many rows at once, on the device that has their logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.types import Logprob


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> list[Logprob]:
    """Natural log-probabilities from raw logits, float32 `[rows, vocabulary]`: of each row's token, and of its `tops`
    most probable ones; of equally probable ones those with lower ids.

    `tokens`: int64 `[rows]`, ids of the vocabulary. Waits for the device.
    """
    values = logits.double()
    values -= values.logsumexp(-1, keepdim=True)
    own = values.gather(1, tokens[:, None]).squeeze(1).tolist()
    width = min(max(tops), values.shape[-1])
    columns = _first_ranked(values, width)
    likely = values.gather(1, columns).tolist()
    found = []
    for row, (token, ids) in enumerate(zip(tokens.tolist(), columns.tolist(), strict=True)):
        pairs = sorted(zip(ids, likely[row], strict=True), key=lambda pair: (-pair[1], pair[0]))
        found.append(Logprob(token, own[row], tuple(pairs[: tops[row]])))
    return found


def _first_ranked(values: torch.Tensor, width: int) -> torch.Tensor:
    """Columns of the `width` largest values of each row, ascending, int64 `[rows, width]`; of equal ones the first."""
    if not width:
        return torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    least = values.topk(width).values[:, -1:]
    above, equal = values > least, values == least
    ties_kept = width - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= ties_kept))
    return kept.nonzero()[:, 1].view(-1, width)
