"""Samples the tokens of many rows at once, on the device that has their logits.

Computes the same function as `engine.runner.sampler` does row by row on the host; see `draws.py` for what may differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.types import Logprob, SampledToken
from engine.runner.device_sampling.adjustments import NO_CHANGES, adjusted, changes_of
from engine.runner.device_sampling.draws import draw_tokens
from engine.runner.device_sampling.logprobs import logprobs_of
from engine.runner.sampling_row import SamplingRow
from splitserve.errors import SplitserveError
from splitserve.request_guard import request_error

ROWS_AT_ONCE = 32
"""Bounds the memory for copies: a few hundred MB for a vocabulary of 128,000 tokens."""


def sample_rows(
    logits: torch.Tensor, rows: Sequence[SamplingRow]
) -> list[SampledToken | SplitserveError | None]:
    """One result per row of `logits` `[rows, vocabulary]`, any float dtype: its token; None if its grammar leaves none;
    the error that its parameters raised.
    """
    results: list[SampledToken | SplitserveError | None] = []
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        end = begin + ROWS_AT_ONCE
        results += _sample_part(logits[begin:end].float(), rows[begin:end])
    return results


def _sample_part(
    raw: torch.Tensor, rows: Sequence[SamplingRow]
) -> list[SampledToken | SplitserveError | None]:
    broken: dict[int, SplitserveError] = {}
    changes = []
    for place, row in enumerate(rows):
        try:
            changes.append(changes_of(row, raw.shape[-1]))
        except BaseException as error:
            broken[place] = request_error(error, f"row {place}")
            changes.append(NO_CHANGES)
    values = adjusted(raw, [row.sampling for row in rows], changes)
    tokens = _choose(values, rows)
    of_row = _logprobs(raw, tokens, rows)
    results: list[SampledToken | SplitserveError | None] = []
    for place, token in enumerate(tokens.tolist()):
        left = None if token < 0 else SampledToken(token, of_row.get(place))
        results.append(broken.get(place, left))
    return results


def _choose(values: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The rows' tokens from adjusted logits, int64 `[rows]`; -1 for a row whose grammar leaves none."""
    drawn = [place for place, row in enumerate(rows) if not row.sampling.greedy]
    masked = [place for place, row in enumerate(rows) if row.mask is not None]
    chosen = [rows[place] for place in drawn]
    sampling, uniforms = [row.sampling for row in chosen], [row.uniform for row in chosen]
    if len(drawn) == len(rows) and not masked:
        return draw_tokens(values, sampling, uniforms)
    best, tokens = values.max(dim=-1)
    if drawn:
        tokens[drawn] = draw_tokens(values[drawn], sampling, uniforms)
    if masked:
        # What was drawn from a row of -inf is no token, so it is replaced before anything is looked up with it.
        tokens[masked] = torch.where(torch.isfinite(best[masked]), tokens[masked], -1)
    return tokens


def _logprobs(raw: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SamplingRow]) -> dict[int, Logprob]:
    """The log-probabilities of the rows that ask for them, by place."""
    asked = {place: row.sampling.logprobs for place, row in enumerate(rows)}
    tops = {place: top for place, top in asked.items() if top is not None}
    if not tops:
        return {}
    places = list(tops)
    found = logprobs_of(raw[places], tokens[places].clamp(min=0), list(tops.values()))
    return dict(zip(places, found, strict=True))
