"""Who computes a prompt with a target: the prefill worker, or a decode worker that keeps the answer. Pure.

    ready(w) = (work ahead + own work) / share(w)        left = 0.9 (due - now)

1. the prefill worker, if it is ready within 0.3 of what is left: prompts on decode workers cost their streams;
2. else the decode worker that is ready first, if it is in time, though the prefill worker be sooner;
3. else the prefill worker, if it is in time; else the decode worker if it takes 30% less, else the prefill worker.

So the fixed split (a prefill worker that is always in time) and colocated workers (one that never is) are two results
of one rule. `share` is what streams leave of a worker's time; its token clock keeps them whatever is believed here.
See docs/decisions/0028-who-computes-a-prompt.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.pacing.step_time_fit import DecodeStepFit, PromptFit
from engine.pacing.token_clock import MIN_CHUNK_TOKENS

MARGIN = 0.9
"""Share of the time that is left, and of a stream's target, that plans use."""
SOON_SHARE = 0.3
SOONER_SHARE = 0.7
LEAST_SHARE = 0.01
"""A worker whose streams leave nothing is not infinitely far away: its clock gives prompts a little in any case."""


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """A worker that could compute the prompt. Seconds."""

    ahead_s: float
    """Work of prompts that are served before this one."""
    work_s: float
    """Of this prompt: what the worker's cache lacks of it."""
    share: float = 1.0
    """Of its time, what its streams leave to prompts; above 0."""

    @property
    def ready_s(self) -> float:
        """From now until the first token."""
        return (self.ahead_s + self.work_s) / self.share


def share_left(
    fit: DecodeStepFit | None,
    streams: int,
    context_tokens: int,
    tpot_s: float | None,
    prompts: PromptFit,
) -> float:
    """What `streams` with so many tokens of context together, each due a token every `tpot_s`, leave of the time.

    1 without streams, without a target, or while steps are unknown.

    Every chunk has a price beside its tokens (`base_s`, `mixing_s`). One chunk takes what a step leaves; where that is
    less than the least chunk takes, the clock saves up for one, and all chunks are of that size.
    """
    if not streams or tpot_s is None or fit is None:
        return 1.0
    period_s = MARGIN * tpot_s
    left_s = period_s - fit.step_s(streams, context_tokens)
    if left_s <= 0:
        return LEAST_SHARE
    price_s = prompts.base_s + prompts.mixing_s
    least_s = prompts.chunk_s(MIN_CHUNK_TOKENS, 0) + prompts.mixing_s
    of_tokens_s = max(left_s - price_s, left_s * (least_s - price_s) / least_s)
    return max(LEAST_SHARE, of_tokens_s / period_s)


def choose_place(prefill: PromptPlace, decodes: Sequence[PromptPlace], left_s: float) -> int | None:
    """The index of the decode worker that computes the prompt, None for the prefill worker.

    `left_s`: until the first token is due; at most 0 for one that is late.
    """
    left_s *= MARGIN
    prefill_s = prefill.ready_s
    if prefill_s <= SOON_SHARE * left_s or not decodes:
        return None
    first = min(range(len(decodes)), key=lambda index: decodes[index].ready_s)
    decode_s = decodes[first].ready_s
    if decode_s <= left_s:
        return first
    if prefill_s <= left_s:
        return None
    return first if decode_s <= SOONER_SHARE * prefill_s else None


def granted_tokens(place: PromptPlace, fit: PromptFit, tokens: int, cached: int, left_s: float) -> int:
    """Prompt tokens that a decode worker may compute itself: at least the `tokens` that it is thought to lack, and
    more, if its cache has lost some, as far as they fit into what is left."""
    room_s = MARGIN * left_s * place.share - place.ahead_s
    return max(tokens, fit.tokens_within(room_s, cached))
