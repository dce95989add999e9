"""Conditional disaggregation: when a decode worker computes a prompt itself, without prefill worker and handoff. Pure.

`local_prefill: auto` compares, by the workers' latency models, when the first token comes either way:

    split   queue of the prefill worker, compute there, transfer of the KV
    local   prompts that wait at the decode worker, compute there beside its streams

The decision ignores decode workers other than the one that the router has chosen; prompts and streams that arrive
meanwhile; that a decode worker whose cache turns out to lack more of the prompt asks for the handoff after all; and
that prefill workers may stay idle while decode workers compute prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.routing.router import Pair
from coordinator.workers.load import DecodeLoad, PrefillLoad, WorkerLoads
from splitserve.config.coordinator import LocalPrefill
from splitserve.latency_model import LatencyModel

NO_LIMIT = 2**32 - 1
"""Number of local prefill tokens that lets the decode worker compute the prompt however much of it is uncached."""
MAX_TOKENS_WITHOUT_TARGET = 256
"""Most uncached tokens of a prompt that is computed beside streams without a TPOT target."""
MIN_CHUNK_TOKENS = 16
"""Fewest prompt tokens that the engine computes in a step beside streams, whatever their targets."""


@dataclass(frozen=True, slots=True)
class LocalPrefillFacts:
    """The inputs of the decision, for one prompt and one pair of workers."""

    tokens: int
    """Prompt tokens that the decode worker lacks."""
    cached_tokens: int
    """Leading prompt tokens that the decode worker holds."""
    split_s: float | None
    """Seconds until the first token by way of the prefill worker; None: not measured."""
    model: LatencyModel
    """The decode worker's latency model."""
    waiting_tokens: int = 0
    """Prompt tokens that wait or are being computed on the decode worker."""
    streams: int = 0
    """Sequences that the decode worker decodes."""
    context_tokens: int = 0
    """KV tokens of these sequences."""
    tpot_s: float | None = None
    """The strictest TPOT target of these sequences and of the request; None without any."""


def local_prefill_tokens(facts: LocalPrefillFacts) -> int:
    """Prompt tokens that the decode worker may compute itself: all that it lacks, or 0."""
    prefill = facts.model.prefill
    step_s = facts.model.decode_step_s(facts.streams, facts.context_tokens) if facts.streams else 0.0
    # 1. Without measurements the prompt is handed off.
    if facts.split_s is None or prefill is None or step_s is None:
        return 0
    # 2. Without a TPOT target a long prompt is handed off; a short one delays the streams little.
    if facts.tpot_s is None and facts.tokens > MAX_TOKENS_WITHOUT_TARGET:
        return 0
    # Time for the waiting prompts and this one, if no sequence is decoded meanwhile.
    local_s = prefill.prefill_s(facts.waiting_tokens) + prefill.prefill_s(facts.tokens, facts.cached_tokens)
    # 3. Beside streams with a target each step computes as many prompt tokens as the target leaves time for.
    if facts.streams and facts.tpot_s is not None:
        chunk = prefill.tokens_within(facts.tpot_s - step_s, facts.cached_tokens + facts.tokens)
        # 3a. The target leaves too little time: the streams would miss it.
        if chunk < MIN_CHUNK_TOKENS:
            return 0
        # 3b. The prompts take this many steps, each as long as the target.
        local_s = max(local_s, math.ceil((facts.waiting_tokens + facts.tokens) / chunk) * facts.tpot_s)
    # 4. The way that brings the first token sooner.
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
    """Prompt tokens that the decode worker of a pair may compute itself, for a request with this TPOT target; 0: the
    prompt is handed off. `mode` is the setting `local_prefill`. `behind_queue`: False decides as if no prompt waited at
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
    cached = cost.cached_tokens, cost.decode_cached_tokens
    return facts_of(
        prefill, decode, prompt_tokens, *cached, tpot_s, cost.transfer_s, behind_queue=behind_queue
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
    """The facts for a prompt of which the workers cache `cached_tokens` and `decode_cached_tokens` leading tokens.
    `behind_queue`: False ignores the prompts that wait at the prefill worker.

    A decode worker that has not computed a prompt yet counts as fast as the prefill worker.
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
