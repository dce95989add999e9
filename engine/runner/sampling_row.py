"""The inputs of sampling beside the logits: parameters, context, grammar mask and the key of the noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.model_runner import SamplingParams, ScheduledSequence
from engine.runner.gumbel_noise import noise_key
from engine.runner.structured_output import Mask


class SamplingRow(NamedTuple):
    """One row to sample. `token_ids[:prompt_tokens]` is the prompt, `token_ids[prompt_tokens:end]` the output."""

    sampling: SamplingParams
    token_ids: Sequence[int]
    prompt_tokens: int
    end: int
    banned_token_ids: frozenset[int] = frozenset()
    mask: Mask | None = None
    """The tokens that the row's grammar and its `allowed_token_ids` allow; None without both."""

    @classmethod
    def of(cls, sequence: ScheduledSequence, mask: Mask | None) -> SamplingRow:
        """The row of a sequence whose end a step computes."""
        return cls(
            sampling=sequence.sampling,
            token_ids=sequence.token_ids,
            prompt_tokens=sequence.prompt_tokens,
            end=sequence.num_computed + sequence.num_new,
            banned_token_ids=sequence.banned_token_ids,
            mask=mask,
        )

    @property
    def position(self) -> int:
        """Position in the output, from 0, of the token to be sampled."""
        return self.end - self.prompt_tokens

    @property
    def adjusted(self) -> bool:
        """Whether the logits are changed before a token is sampled."""
        params = self.sampling
        penalized = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        return bool(penalized or params.logit_bias or self.banned_token_ids) or self.mask is not None

    @property
    def noise_key(self) -> int:
        """The key of the noise that the token is drawn with."""
        return noise_key(self.sampling.seed, self.position)

    @property
    def plain(self) -> bool:
        """Whether the argmax is all that is needed."""
        return self.sampling.greedy and self.sampling.logprobs is None and not self.adjusted
