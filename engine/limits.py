"""Which requests an engine takes at all."""

from __future__ import annotations

from dataclasses import dataclass

from engine.types import EngineRequest
from splitserve.errors import InvalidArgumentError, ResourceExhaustedError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds from the model and the pool, all in tokens."""

    context_tokens: int
    pool_tokens: int
    vocabulary_size: int

    @property
    def sequence_tokens(self) -> int:
        """Longest sequence, prompt and output: the last token needs no KV."""
        return min(self.context_tokens, self.pool_tokens + 1)

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidArgumentError, or ResourceExhaustedError for what the pool can never hold."""
        tokens = request.token_ids
        if not tokens:
            raise InvalidArgumentError("the prompt is empty", field="prompt")
        if min(tokens) < 0 or max(tokens) >= self.vocabulary_size:
            raise InvalidArgumentError(
                f"token ids must be in 0..{self.vocabulary_size - 1}", field="token_ids"
            )
        if not 0 <= request.prior_output_tokens < len(tokens):
            raise InvalidArgumentError(
                f"prior_output_tokens must be in 0..{len(tokens) - 1}", field="prior_output_tokens"
            )
        if request.stop.max_tokens <= request.prior_output_tokens:
            raise InvalidArgumentError(
                f"max_tokens must exceed the {request.prior_output_tokens} tokens that were output already",
                field="max_tokens",
            )
        if len(tokens) >= self.context_tokens:
            raise InvalidArgumentError(
                f"the prompt has {len(tokens)} tokens; the context of {self.context_tokens} tokens must hold"
                " it and one output token",
                field="prompt",
            )
        if len(tokens) > self.pool_tokens:
            raise ResourceExhaustedError(
                f"the prompt has {len(tokens)} tokens, the KV pool holds {self.pool_tokens}",
                reason="KV_POOL_TOO_SMALL",
            )
