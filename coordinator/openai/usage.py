"""Token counts of a request's answers together, as OpenAI counts them."""

from __future__ import annotations

from typing import Any

from splitserve.v1 import inference_pb2


class UsageSum:
    """A prompt counts once, however many answers it gets; their tokens all count."""

    def __init__(self, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._prompt = self._completion = self._cached = 0

    def add(self, choice: int, done: inference_pb2.GenerationDone) -> None:
        """One answer has ended."""
        self._completion += done.usage.completion_tokens
        if choice % self._choices_per_prompt == 0:
            self._prompt += done.usage.prompt_tokens
            self._cached += _cached_tokens(done)

    def shown(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def _cached_tokens(done: inference_pb2.GenerationDone) -> int:
    """Prompt tokens that were not computed again, by whichever worker computed the prompt."""
    usage, served = done.usage, done.served_by
    if served.decode_worker and not served.transport:  # nothing was shipped: it computed the prompt itself
        return max(usage.cached_prompt_tokens, usage.decode_cached_tokens)
    return usage.cached_prompt_tokens
