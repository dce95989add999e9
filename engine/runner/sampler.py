"""Samples next tokens: a pure function of logits, parameters, seed and position.

A row's result never depends on other rows: its noise comes from a counter-based generator over (seed, position, token
id). So a request gets the same tokens in any batch, on any worker, and after a resume. Sums in float64 may differ in
their last bits from device to device, so about one draw in 10^12 gives another token.

Order of operations: logit bias, repetition penalty, presence and frequency penalties, banned tokens and mask,
temperature, top-k, top-p, min-p. Equal logits are ranked by token id, lower first.

Everything is computed on the device that has the logits. The host lists the tokens that each row changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.model_runner import Logprob, RowsFailedError, SampledToken, SamplingParams
from engine.runner.gumbel_noise import noise_of
from engine.runner.sampling_row import SamplingRow
from engine.runner.structured_output import NOTHING_LEFT, GrammarFailedError, allowed_tokens
from splitserve.errors import SplitserveError
from splitserve.rpc.status import request_error

Ints = NDArray[np.int64]
_NONE = np.empty(0, np.int64)
ROWS_AT_ONCE = 32
"""Rows that are sampled together on a GPU. Bounds the memory for copies: a few hundred MB for a vocabulary of 128,000
tokens. On cpu each row is sampled by itself, so that what is computed of it stays in a core's cache."""
GUESS = 512
"""Candidates of a row without top-k that are ranked at first; nearly always enough for top-p or min-p, and much cheaper
than ranking all."""
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
    best: list[int] = best_tokens(logits).tolist() if wait_argmax is None else wait_argmax()
    if failed := tuple(row for row, token in enumerate(best) if token < 0):
        raise NanLogitsError(f"logits of {len(failed)} of {len(rows)} sequences are not finite", failed)
    tokens = [SampledToken(token) for token in best]
    others = [index for index, row in enumerate(rows) if not row.plain]
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


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The token of each row's largest logit, the first of equal ones, int64 `[rows]`; -1 if that logit is not finite,
    as in a row with a NaN."""
    best, tokens = logits.max(dim=-1)
    return torch.where(torch.isfinite(best), tokens, -1)


def sample_rows(
    logits: torch.Tensor, rows: Sequence[SamplingRow], at_once: int | None = None
) -> list[SampledToken | SplitserveError | None]:
    """One result per row of `logits` `[rows, vocabulary]`, any float dtype, `at_once` rows together; None: see
    ROWS_AT_ONCE.

    A result is the row's token, None if its grammar leaves no token, or the error that its parameters raised.
    """
    results: list[SampledToken | SplitserveError | None] = []
    at_once = at_once or (1 if logits.is_cpu else ROWS_AT_ONCE)
    for begin in range(0, len(rows), at_once):
        end = begin + at_once
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
    sampling, keys = [row.sampling for row in chosen], [row.noise_key for row in chosen]
    if len(drawn) == len(rows) and not masked:
        return draw_tokens(values, sampling, keys)
    best, tokens = values.max(dim=-1)
    if drawn:
        tokens[drawn] = draw_tokens(values[drawn], sampling, keys)
    if masked:
        # A draw from a row of -inf gives an arbitrary token: it is replaced before anything is looked up with it.
        tokens[masked] = torch.where(torch.isfinite(best[masked]), tokens[masked], -1)
    return tokens


def _logprobs(raw: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SamplingRow]) -> dict[int, Logprob]:
    """The log-probabilities of the rows that ask for them, by place."""
    counts = {place: row.sampling.logprobs for place, row in enumerate(rows)}
    tops = {place: count for place, count in counts.items() if count is not None}
    if not tops:
        return {}
    places = list(tops)
    logprobs = logprobs_of(raw[places], tokens[places].clamp(min=0), list(tops.values()))
    return dict(zip(places, logprobs, strict=True))


class Changes(NamedTuple):
    """The tokens that a row changes, by kind of change; empty for a kind that the row does not ask for."""

    biased: Ints
    biases: NDArray[np.float32]
    """The bias of each token in `biased`."""
    context: Ints
    """Tokens of prompt and output, for the repetition penalty."""
    output: Ints
    """Tokens of the output, for presence and frequency penalties."""
    banned: Ints
    allowed: NDArray[np.bool_] | None
    """bool `[vocabulary]`, bans included; None without a grammar."""

    @property
    def empty(self) -> bool:
        """Whether the logits stay as they are."""
        tokens = self.biased.size + self.context.size + self.output.size + self.banned.size
        return not tokens and self.allowed is None


NO_CHANGES = Changes(_NONE, np.empty(0, np.float32), _NONE, _NONE, _NONE, None)


def changes_of(row: SamplingRow, vocabulary: int) -> Changes:
    """The changes that a row asks for.

    Raises IndexError for a token outside the vocabulary: looking it up on a device would end the process.
    """
    if not row.adjusted:
        return NO_CHANGES
    params = row.sampling
    counted = bool(params.presence_penalty or params.frequency_penalty)
    masked = row.mask is not None
    return Changes(
        biased=_checked((token for token, _ in params.logit_bias), vocabulary),
        biases=np.fromiter((bias for _, bias in params.logit_bias), np.float32),
        context=_checked(row.token_ids[: row.end] if params.repetition_penalty != 1.0 else (), vocabulary),
        output=_checked(row.token_ids[row.prompt_tokens : row.end] if counted else (), vocabulary),
        banned=_checked(() if masked else row.banned_token_ids, vocabulary),
        allowed=allowed_tokens(row.mask, vocabulary, row.banned_token_ids) if row.mask is not None else None,
    )


def _checked(tokens: Iterable[int], vocabulary: int) -> Ints:
    ids = np.fromiter(tokens, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise IndexError(f"a token id is not below {vocabulary}")
    return ids


def adjusted(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], changes: Sequence[Changes]
) -> torch.Tensor:
    """Float32 logits `[rows, vocabulary]` with each row's changes; the same tensor where there are none.

    The repetition penalty is CTRL's (arXiv:1909.05858, section 4.1) in the form that also lowers negative logits;
    presence and frequency penalties are OpenAI's.
    """
    if all(change.empty for change in changes):
        return logits
    device, result = logits.device, logits.clone()
    if (biased := _places([c.biased for c in changes], device)) is not None:
        biases = torch.from_numpy(np.concatenate([c.biases for c in changes])).to(device)
        result.index_put_(biased, biases, accumulate=True)
    if (context := _places([c.context for c in changes], device)) is not None:
        seen = torch.zeros_like(result, dtype=torch.bool)
        seen[context] = True
        penalty = _column([s.repetition_penalty for s in sampling], device)
        penalized = torch.where(result > 0, result / penalty, result * penalty)
        result = torch.where(seen, penalized, result)
    if (output := _places([c.output for c in changes], device)) is not None:
        counts = torch.zeros_like(result)
        counts.index_put_(output, torch.ones((), device=device), accumulate=True)
        presence = _column([s.presence_penalty for s in sampling], device)
        frequency = _column([s.frequency_penalty for s in sampling], device)
        result -= torch.where(counts > 0, presence + frequency * counts, 0.0)
    if (banned := _places([c.banned for c in changes], device)) is not None:
        result[banned] = float("-inf")
    masked = {place: c.allowed for place, c in enumerate(changes) if c.allowed is not None}
    if masked:
        allowed = torch.from_numpy(np.stack(list(masked.values()))).to(device)
        places = list(masked)
        result[places] = result[places].masked_fill(~allowed, float("-inf"))
    return result


def _places(tokens: Sequence[Ints], device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Row and column of each token, int64 `[tokens]` both; None if there are none."""
    columns = np.concatenate(tokens)
    if not columns.size:
        return None
    rows = np.repeat(np.arange(len(tokens)), [part.size for part in tokens])
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """float32 `[rows, 1]`."""
    return torch.tensor(values, dtype=torch.float32).to(device)[:, None]


def draw_tokens(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], keys: Sequence[int]
) -> torch.Tensor:
    """One token per row of `logits` `[rows, vocabulary]`, int64 `[rows]`: temperature, top-k, top-p and min-p, then the
    allowed token whose logit and noise have the largest sum.

    `keys`: the key of each row's noise. Waits for the device where rows have filters. Makes several float64 copies of
    the logits.
    """
    temperature = torch.tensor([s.temperature for s in sampling], dtype=torch.float64).to(logits.device)
    scaled = logits.double()
    # Relative to the largest, so that no temperature makes it infinite.
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature[:, None]
    noisy = scaled + noise_of(keys, scaled.shape[-1], scaled.device)
    if any(s.top_k or s.top_p < 1.0 or s.min_p > 0.0 for s in sampling):
        noisy = noisy.masked_fill(~kept_by_filters(scaled, sampling), float("-inf"))
    return noisy.argmax(-1)


def kept_by_filters(scaled: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """The tokens that pass the filters, bool `[rows, vocabulary]`, from float64 logits with temperature applied;
    the largest of a row is 0.

    Each filter keeps a prefix of the ranking, so counting suffices. Of equal logits the lower token id ranks higher.
    """
    size = scaled.shape[-1]
    # One more than any top-k keeps, so that a full top-k does not look like a guess that was too small.
    guess = min(size, max(1 + params.top_k if params.top_k else GUESS for params in sampling))
    for width in (guess, size):
        ranked = scaled.topk(width).values
        count = _count(scaled, ranked, sampling)
        # A prefix that fills the guess may be longer.
        if width == size or not bool((count == width).any()):
            break
    return _largest(scaled, ranked.gather(1, count - 1), count)


def _largest(values: torch.Tensor, least: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """Where each row has its `count` largest values, bool like `values`; of equal values the first ones.

    `least` `[rows, 1]`: the smallest of them. `count`: int64 `[rows, 1]`, or one number for all rows.
    """
    largest = values >= least
    if bool((largest.sum(-1, keepdim=True) == count).all()):
        return largest
    above, equal = values > least, values == least
    ties_kept = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= ties_kept))


def _count(scaled: torch.Tensor, ranked: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """Length of the prefix that top-k, top-p and min-p keep of `ranked` `[rows, width]`; int64 `[rows, 1]`, at least 1.

    Top-p (arXiv:1904.09751) keeps the smallest prefix whose probability,
    relative to the tokens that top-k kept, is at least p; min-p (arXiv:2407.01082) keeps tokens at least min_p times as
    probable as the first.
    """
    size, width = scaled.shape[-1], ranked.shape[-1]
    table = [(s.top_k or size, s.top_p - _ROUNDING if s.top_p < 1.0 else 2.0, s.min_p) for s in sampling]
    limits = torch.tensor(table, dtype=torch.float64).to(scaled.device)
    top_k, top_p, min_p = limits.split(1, dim=-1)
    within = torch.arange(width, device=scaled.device) < top_k
    weights = ranked.exp()
    of_first = (weights * within).sum(-1, keepdim=True)
    probabilities = weights / torch.where(top_k < size, of_first, scaled.exp().sum(-1, keepdim=True))
    before = probabilities.cumsum(-1) - probabilities
    kept = within & (before < top_p) & (probabilities >= min_p * probabilities[:, :1])
    return kept.sum(-1, keepdim=True).clamp(min=1)


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> list[Logprob]:
    """Natural log-probabilities from raw logits, float32 `[rows, vocabulary]`.

    They are of each row's token, and of its `tops` most probable tokens; of equally probable ones the lower ids count.

    `tokens`: int64 `[rows]`, ids of the vocabulary. Waits for the device.
    """
    values = logits.double().log_softmax(-1)
    own = values.gather(1, tokens[:, None]).squeeze(1).tolist()
    width = min(max(tops), values.shape[-1])
    columns = first_ranked(values, width)
    likely = values.gather(1, columns).tolist()
    logprobs = []
    for row, (token, ids) in enumerate(zip(tokens.tolist(), columns.tolist(), strict=True)):
        pairs = sorted(zip(ids, likely[row], strict=True), key=lambda pair: (-pair[1], pair[0]))
        logprobs.append(Logprob(token, own[row], tuple(pairs[: tops[row]])))
    return logprobs


def first_ranked(values: torch.Tensor, width: int) -> torch.Tensor:
    """Columns of the `width` largest values of each row, ascending, int64 `[rows, width]`; of equal ones the first."""
    if not width:
        return torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    likely, columns = values.topk(min(width + 1, values.shape[-1]))
    columns = columns[:, :width].sort().values
    if width < values.shape[-1]:
        # Which of equal values `topk` takes matters only where they are on both sides of the last place.
        tied = likely[:, -2] == likely[:, -1]
        kept = _largest(values[tied], likely[tied, -2:-1], width)
        columns[tied] = kept.nonzero()[:, 1].view(-1, width)
    return columns
