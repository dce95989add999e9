"""Log-probabilities of prompts' tokens, computed a few positions at a time once a step's tokens are sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.backends.interface import PromptRows
from engine.runner.sampler import first_ranked

SLICE_ROWS = 64
"""Positions whose logits are in memory at once: 12 MiB in float32 with a vocabulary of 49,152."""


def put_prompt_logprobs(prompts: PromptRows, device: torch.device) -> None:
    """Adds what a step's rows predict to the `prompt_logprobs` of their sequences. Waits for the device."""
    assert prompts.logits_of is not None, "the model has not run"
    for sequence, first_row, count in prompts.chunks:
        prompt, top = sequence.prompt_logprobs, sequence.sampling.prompt_logprobs
        assert prompt is not None
        assert top is not None
        for start in range(0, count, SLICE_ROWS):
            stop = min(start + SLICE_ROWS, count)
            logits = prompts.logits_of(torch.arange(first_row + start, first_row + stop, device=device))
            position = sequence.num_computed + start
            next_tokens = sequence.token_ids[position + 1 : position + 1 + stop - start]
            prompt.put(position, *_logprobs(logits, next_tokens, top))


def _logprobs(
    logits: torch.Tensor, tokens: Sequence[int], top: int
) -> tuple[list[float], list[int], list[list[int]], list[list[float]]]:
    """The values of `PromptLogprobs` for logits `[rows, vocabulary]` and the token after each row. Of equally probable
    alternatives those with lower ids count. Where the logits are not finite, all tokens have probability 0."""
    values = logits.float().log_softmax(-1).nan_to_num_(nan=float("-inf"), neginf=float("-inf"))
    own = values.gather(1, torch.tensor(tokens, device=values.device)[:, None])
    ranks = 1 + (values > own).sum(-1)
    columns = first_ranked(values, min(top, values.shape[-1]))
    likely, order = values.gather(1, columns).sort(descending=True, stable=True)
    return own.squeeze(1).tolist(), ranks.tolist(), columns.gather(1, order).tolist(), likely.tolist()
