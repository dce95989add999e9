"""Logit bias, penalties, bans and grammar masks of many rows at once, on the device that has their logits.

`engine.runner.sampler.adjust` defines them, and their order. The host says which tokens each row is about; what is
computed with the logits is computed on the device, so that they need not leave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.types import SamplingParams
from engine.runner.sampling_row import SamplingRow
from engine.runner.structured_output import allowed_tokens

Ints = NDArray[np.int64]
_NONE = np.empty(0, np.int64)


class Changes(NamedTuple):
    """The tokens that a row's changes are about; those of a change that the row does not ask for are empty."""

    biased: Ints
    biases: NDArray[np.float32]
    """One of each token in `biased`."""
    context: Ints
    """Prompt and output, for the repetition penalty."""
    output: Ints
    """For presence and frequency penalties."""
    banned: Ints
    allowed: NDArray[np.bool_] | None
    """bool `[vocabulary]`; None without a grammar, which has the bans in it."""

    @property
    def empty(self) -> bool:
        """Whether the logits stay as they are."""
        tokens = self.biased.size + self.context.size + self.output.size + self.banned.size
        return not tokens and self.allowed is None


NO_CHANGES = Changes(_NONE, np.empty(0, np.float32), _NONE, _NONE, _NONE, None)


def changes_of(row: SamplingRow, vocabulary: int) -> Changes:
    """What a row asks for. Raises IndexError for a token that is not in the vocabulary: on a device, looking it up
    would end the process."""
    if not row.adjusted:
        return NO_CHANGES
    s = row.sampling
    counted = bool(s.presence_penalty or s.frequency_penalty)
    masked = row.mask is not None
    return Changes(
        biased=_checked((token for token, _ in s.logit_bias), vocabulary),
        biases=np.fromiter((bias for _, bias in s.logit_bias), np.float32),
        context=_checked(row.token_ids[: row.end] if s.repetition_penalty != 1.0 else (), vocabulary),
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
    """Float32 logits `[rows, vocabulary]` with each row's changes; the same tensor where there are none."""
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
