"""Samples next tokens: a pure function of logits, parameters, seed and position.

A row's result never depends on other rows: its noise comes from a counter-based generator over (seed, position, token
id). So a request gets the same tokens in any batch, on any worker, and after a resume.

Order of operations: logit bias, repetition penalty, presence and frequency penalties, banned tokens and mask,
temperature, top-k, top-p, min-p. Equal logits are ranked by token id, lower first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.model_runner import Logprob, RowsFailedError, SampledToken, SamplingParams
from engine.runner.device_sampling import sample_rows
from engine.runner.gumbel_noise import noise_of
from engine.runner.sampling_row import SamplingRow
from engine.runner.structured_output import NOTHING_LEFT, GrammarFailedError
from engine.runner.structured_output import allowed_tokens as grammar_tokens
from splitserve.errors import SplitserveError
from splitserve.rpc.status import request_error

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NUCLEUS_GUESS = 1024
"""Candidates sorted at first; nearly always enough for top-p or min-p, and much cheaper than sorting all."""

_ROWS_AT_ONCE = 8
"""Rows that are converted to float32 at a time; few enough to stay in a core's cache."""
_ROUNDING = 1e-12
"""Bound on the rounding error of sums of float64 probabilities; a sum this close to top-p has reached it."""


class NanLogitsError(RowsFailedError):
    """Rows whose largest logit is NaN or infinite, so that any token would be arbitrary."""

    default_reason = "NAN_LOGITS"


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], wait_argmax: Callable[[], list[int]] | None = None
) -> list[SampledToken]:
    """Samples one token per row. `logits` `[rows, vocabulary]`, any float dtype and device, are left unchanged.

    `wait_argmax` waits for and returns the token of each row's largest logit, -1 where that is not finite; None: it is
    computed here. Errors carry the rows that failed: NanLogitsError where the largest logit is not finite,
    GrammarFailedError where the grammar allows no token that the model can choose, RowsFailedError (INTERNAL) where the
    sampling itself raised.
    """
    best = _argmax(logits) if wait_argmax is None else wait_argmax()
    if failed := tuple(row for row, token in enumerate(best) if token < 0):
        raise NanLogitsError(f"logits of {len(failed)} of {len(rows)} sequences are not finite", failed)
    tokens = [SampledToken(token) for token in best]
    others = [index for index, row in enumerate(rows) if not row.plain]
    if logits.is_cpu:
        chosen = [_sample_on_host(logits[index], rows[index]) for index in others]
    else:
        chosen = sample_rows(logits[others], [rows[index] for index in others])
    results = dict(zip(others, chosen, strict=True))
    if broken := {index: result for index, result in results.items() if isinstance(result, SplitserveError)}:
        first = next(iter(broken.values()))
        raise RowsFailedError(first.message, tuple(broken), reason=first.reason)
    if stuck := tuple(index for index, result in results.items() if result is None):
        raise GrammarFailedError(NOTHING_LEFT, stuck)
    for index, token in results.items():
        assert isinstance(token, SampledToken)
        tokens[index] = token
    return tokens


def _argmax(logits: torch.Tensor) -> list[int]:
    """The token of each row's largest logit, the first of equal ones; -1 if that logit is not finite or any is NaN."""
    result: list[int] = []
    if not logits.is_cpu:
        best, indices = logits.max(dim=-1)
        result += torch.where(torch.isfinite(best), indices, -1).tolist()
        return result
    # NumPy's argmax is vectorized, torch's on cpu is not.
    for part in logits.split(_ROWS_AT_ONCE):
        values = part.float().numpy()
        tokens = values.argmax(axis=1)
        finite = np.isfinite(values[np.arange(len(tokens)), tokens])
        result += np.where(finite, tokens, -1).tolist()
    return result


def _sample_on_host(raw: torch.Tensor, row: SamplingRow) -> SampledToken | SplitserveError | None:
    """The result of one row `[vocabulary]`; see `sample_rows`."""
    try:
        return _sample_row(raw.float(), row)
    except BaseException as error:
        return request_error(error, "a row")


def _sample_row(raw: torch.Tensor, row: SamplingRow) -> SampledToken | None:
    """The token of one row of float32 logits `[vocabulary]`; None if its grammar allows none."""
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
    params = row.sampling
    logits = logits.clone()
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias, strict=True)
        logits[list(tokens)] += torch.tensor(biases, dtype=logits.dtype)
    if (penalty := params.repetition_penalty) != 1.0:
        seen = torch.tensor(row.token_ids[: row.end], dtype=torch.long).unique()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.position:
        output = torch.tensor(row.token_ids[row.prompt_tokens : row.end], dtype=torch.long)
        tokens_seen, counts = output.unique(return_counts=True)
        logits[tokens_seen] -= params.presence_penalty + params.frequency_penalty * counts
    if row.mask is not None:
        allowed = torch.from_numpy(grammar_tokens(row.mask, logits.numel(), row.banned_token_ids))
        logits.masked_fill_(~allowed, float("-inf"))
    elif row.banned_token_ids:
        logits[list(row.banned_token_ids)] = float("-inf")
    return logits


def _draw(logits: NDArray[np.float32], row: SamplingRow) -> int:
    """The allowed token whose logit and noise have the largest sum, in float64."""
    # Relative to the largest logit, so that no temperature makes a value infinite.
    scaled = (logits.astype(np.float64) - logits.max()) / row.sampling.temperature
    allowed = allowed_tokens(scaled, row.sampling)
    if allowed is None:
        return int((scaled + noise_of(np.arange(scaled.size), row.noise_key)).argmax())
    return int(allowed[(scaled[allowed] + noise_of(allowed, row.noise_key)).argmax()])


def allowed_tokens(scaled: Floats, sampling: SamplingParams) -> Ints | None:
    """The token ids, ascending, that pass top-k, top-p and min-p; None means all.

    `scaled`: float64 logits `[vocabulary]`, temperature applied. Each filter keeps a prefix of the ranking, so counting
    suffices: top-p (arXiv:1904.09751) keeps the smallest prefix whose probability, relative to the tokens that top-k
    kept, is at least p; min-p (arXiv:2407.01082) keeps tokens at least min_p times as probable as the first.
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
    """Length of the prefix that top-p and min-p keep of descending logits, at least 1. `total` is their log-sum-exp."""
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
    """The `count` largest values, in descending order."""
    rest = values.size - count
    return np.sort(np.partition(values, rest)[rest:] if rest else values)[::-1]


def _first_ranked(values: Floats, largest: Floats) -> Ints:
    """Ascending indices of the `largest` values, given in descending order; of equal values the first ones."""
    indices = np.flatnonzero(values >= largest[-1])
    surplus = indices.size - largest.size
    if surplus:
        equal = np.flatnonzero(values[indices] == largest[-1])
        indices = np.delete(indices, equal[-surplus:])
    return indices


def _logprobs(logits: NDArray[np.float32], token: int, top: int) -> Logprob:
    """Natural log-probabilities from raw logits: of the sampled token and of the `top` most probable ones."""
    logprobs = logits.astype(np.float64)
    logprobs -= _log_sum_exp(logprobs)
    alternatives: list[tuple[int, float]] = []
    if top:
        tokens = _first_ranked(logprobs, _largest(logprobs, min(top, logprobs.size))).tolist()
        alternatives = [(candidate, float(logprobs[candidate])) for candidate in tokens]
        alternatives.sort(key=lambda pair: (-pair[1], pair[0]))
    return Logprob(token, float(logprobs[token]), tuple(alternatives))
