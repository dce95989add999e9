"""Requests to splitserve: a greedy answer with the arrival time of each token."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count

import numpy as np

from splitserve.client import AsyncClient, Delta

LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 40_000
"""Token ids used in prompts: ordinary tokens in the measured vocabularies."""
_NUMBERS = count(1)


@dataclass(frozen=True)
class AskedAnswer:
    """One answer as its client saw it. Times in seconds, on one clock.

    `token_s` has the arrival of each token, counted from the request; tokens that came in one message share it.
    """

    request_id: str
    token_s: tuple[float, ...]
    compute_s: float = 0.0
    """Seconds in which a worker computed the prompt, as it measured them itself."""
    token_ids: tuple[int, ...] = ()
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held, as the workers report them."""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0]

    @property
    def around_s(self) -> float:
        """TTFT without the computation of the prompt."""
        return self.token_s[0] - self.compute_s

    @property
    def second_token_gap_s(self) -> float:
        """Time between the first and the second token."""
        return self.token_s[1] - self.token_s[0]

    @property
    def steps_s(self) -> list[float]:
        """Times between consecutive later tokens."""
        return list(np.diff(self.token_s[1:]))

    @property
    def tpot_s(self) -> float:
        """Mean time between tokens."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


def random_prompt(numbers: random.Random, tokens: int, vocabulary: int = HIGHEST_TOKEN + 1) -> list[int]:
    """Random tokens, so that no prefix cache holds them."""
    highest = min(HIGHEST_TOKEN, vocabulary - 1)
    lowest = min(LOWEST_TOKEN, highest // 2)
    return [numbers.randint(lowest, highest) for _ in range(tokens)]


async def ask(client: AsyncClient, prompt: Sequence[int], max_tokens: int) -> AskedAnswer:
    """One greedy answer of exactly this many tokens. Raises SplitserveError."""
    request_id = f"bench-{next(_NUMBERS)}"
    token_s: list[float] = []
    token_ids: list[int] = []
    compute_s, cached = 0.0, 0
    began = time.monotonic()
    stream = client.stream(
        prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, request_id=request_id
    )
    async with aclosing(stream) as items:
        async for item in items:
            if isinstance(item, Delta):
                token_s += [time.monotonic() - began] * len(item.token_ids)
                token_ids += item.token_ids
            else:
                compute_s = item.timings.prefill_ms / 1e3
                cached = item.usage.cached_prompt_tokens
    return AskedAnswer(request_id, tuple(token_s), compute_s, tuple(token_ids), cached)
