"""Conditional disaggregation: when a decode worker computes a prompt itself, without prefill worker and handoff. Pure.

`local_prefill: auto` compares, by the workers' latency models, when the first token comes either way:

    split   queue of the prefill worker, compute there, transfer of the KV
    local   prompts that wait at the decode worker, compute there beside its streams

What it does not weigh: other decode workers than the one that the router has chosen; prompts and streams that arrive
meanwhile; the second chance of a prompt, should the decode worker's cache turn out to lack more than is known (the
worker then asks for the handoff); and that a decode worker which computes prompts leaves prefill workers idle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.routing.router import Pair
from coordinator.workers.load import DecodeLoad, PrefillLoad, WorkerLoads
from splitserve.config.coordinator import LocalPrefill
from splitserve.latency_model import LatencyModel, PrefillLatency

NO_LIMIT = 2**32 - 1
"""As a number of tokens: the decode worker computes the prompt itself, whatever it lacks of it."""
MAX_TOKENS_WITHOUT_TARGET = 256
"""The longest prompt, without what is cached, that streams without a TPOT target are held up by."""
MIN_CHUNK_TOKENS = 16
"""The least prompt tokens that the engine computes in a step beside streams, whatever their targets."""


@dataclass(frozen=True, slots=True)
class LocalPrefillFacts:
    """What the decision depends on, for one prompt and one pair of workers."""

    tokens: int
    """Prompt tokens that the decode worker lacks."""
    cached_tokens: int
    """Leading prompt tokens that it holds."""
    split_s: float | None
    """Seconds until the first token by way of the prefill worker; None: unmeasured."""
    model: LatencyModel
    """Of the decode worker."""
    waiting_tokens: int = 0
    """Prompt tokens that wait or are computed there already."""
    streams: int = 0
    """Sequences that it decodes."""
    context_tokens: int = 0
    """Tokens of KV of those."""
    tpot_s: float | None = None
    """The strictest TPOT target of those and of the request; None: there is none."""


def local_prefill_tokens(facts: LocalPrefillFacts) -> int:
    """Prompt tokens that the decode worker may compute itself: all that it lacks, or 0."""
    prefill = facts.model.prefill
    step_s = facts.model.decode_step_s(facts.streams, facts.context_tokens) if facts.streams else 0.0
    # 1. Nothing is decided by a guess: the prompt is handed off.
    if facts.split_s is None or prefill is None or step_s is None:
        return 0
    # 2. Nobody says what the streams need: a short prompt holds them up little, a long one is handed off.
    if facts.tpot_s is None and facts.tokens > MAX_TOKENS_WITHOUT_TARGET:
        return 0
    local_s = _compute_s(prefill, facts)
    # 3. Beside streams with a target each step computes as many prompt tokens as their target leaves time for.
    if facts.streams and facts.tpot_s is not None:
        chunk = prefill.tokens_within(facts.tpot_s - step_s, facts.cached_tokens + facts.tokens)
        # 3a. It leaves too little: the streams would miss it.
        if chunk < MIN_CHUNK_TOKENS:
            return 0
        # 3b. The prompt takes that many steps, each as long as the target.
        local_s = max(local_s, math.ceil((facts.waiting_tokens + facts.tokens) / chunk) * facts.tpot_s)
    # 4. Whichever way brings the first token sooner.
    return facts.tokens if local_s < facts.split_s else 0


def local_tokens_of_pair(
    mode: LocalPrefill,
    pair: Pair,
    prompt_tokens: int,
    loads: WorkerLoads,
    tpot_s: float | None,
    *,
    behind_queue: bool = True,
) -> int:
    """How many prompt tokens the decode worker of a pair may compute itself, for a request with this TPOT target; 0: it
    takes the KV of all. `mode` is the setting `local_prefill`. `behind_queue`: False decides as if no prompt waited at
    the prefill worker."""
    if pair.decode is None:
        return 0
    if pair.is_own or mode == "always":
        return NO_LIMIT
    if mode == "never":
        return 0
    facts = facts_of_pair(pair, prompt_tokens, loads, tpot_s, behind_queue=behind_queue)
    return local_prefill_tokens(facts) if facts is not None else 0


def facts_of_pair(
    pair: Pair, prompt_tokens: int, loads: WorkerLoads, tpot_s: float | None, *, behind_queue: bool = True
) -> LocalPrefillFacts | None:
    """The facts for a prompt on a pair, for a request with this TPOT target; None if one of the workers is gone."""
    prefill = loads.prefill.get(pair.prefill.key)
    decode = loads.decode.get(pair.decode.key) if pair.decode is not None else None
    if prefill is None or decode is None:
        return None
    cost = pair.cost
    return facts_of(
        prefill,
        decode,
        prompt_tokens,
        cost.cached_tokens,
        cost.decode_cached_tokens,
        tpot_s,
        transfer_s=cost.transfer_s,
        behind_queue=behind_queue,
    )


def facts_of(
    prefill: PrefillLoad,
    decode: DecodeLoad,
    prompt_tokens: int,
    cached_tokens: int,
    decode_cached_tokens: int,
    tpot_s: float | None,
    transfer_s: float = 0.0,
    *,
    behind_queue: bool = True,
) -> LocalPrefillFacts:
    """The facts for a prompt of which two workers hold so many leading tokens. `behind_queue`: False leaves out what
    waits at the prefill worker.

    A decode worker that has not computed a prompt yet is taken to be as fast as the prefill worker.
    """
    split_s: float | None = None
    if (model := prefill.latency.prefill) is not None:
        queue_s = model.token_s * prefill.queued_tokens if behind_queue else 0.0
        split_s = queue_s + model.prefill_s(prompt_tokens - cached_tokens, cached_tokens) + transfer_s
    held = min(decode_cached_tokens, prompt_tokens - 1)
    return LocalPrefillFacts(
        tokens=prompt_tokens - held,
        cached_tokens=held,
        split_s=split_s,
        model=LatencyModel(decode.latency.prefill or model, decode.latency.decode),
        waiting_tokens=decode.waiting_prompt_tokens,
        streams=decode.streams,
        context_tokens=decode.computed_context,
        tpot_s=min(filter(None, (tpot_s, *decode.targets_s[:1])), default=None),
    )


def _compute_s(prefill: PrefillLatency, facts: LocalPrefillFacts) -> float:
    """Seconds for what waits and the prompt, if nothing is decoded meanwhile."""
    return prefill.prefill_s(facts.waiting_tokens) + prefill.prefill_s(facts.tokens, facts.cached_tokens)
