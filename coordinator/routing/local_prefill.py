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

from coordinator.request.state import PairCost
from coordinator.routing.router import Pair
from coordinator.workers.load import DecodeLoad, PrefillLoad, WorkerLoads
from splitserve.config.coordinator import LocalPrefill

NO_LIMIT = 2**32 - 1
"""Number of local prefill tokens that lets the decode worker compute the prompt however much of it is uncached."""
MAX_TOKENS_WITHOUT_TARGET = 256
"""Most uncached tokens of a prompt that is computed beside streams without a TPOT target."""
MIN_CHUNK_TOKENS = 16
"""Fewest prompt tokens that the engine computes in a step beside streams, whatever their targets."""


def local_prefill_tokens(
    prefill: PrefillLoad,
    decode: DecodeLoad,
    prompt_tokens: int,
    cost: PairCost,
    tpot_s: float | None,
    *,
    behind_queue: bool = True,
) -> int:
    """Prompt tokens that the decode worker may compute itself: all that it lacks, or 0.

    `cost` has the leading tokens that each worker caches, and the time to transfer KV between them. `tpot_s`: the
    request's TPOT target; None: none. `behind_queue`: False ignores the prompts that wait at the prefill worker. A
    decode worker that has not computed a prompt yet counts as fast as the prefill worker.
    """
    handing_off = prefill.latency.prefill
    computing = decode.latency.prefill or handing_off
    cached = min(cost.decode_cached_tokens, prompt_tokens - 1)
    tokens, waiting_tokens = prompt_tokens - cached, decode.waiting_prompt_tokens
    step_s = decode.latency.decode_step_s(decode.streams, decode.computed_context) if decode.streams else 0.0
    strictest_s = min(filter(None, (tpot_s, *decode.targets_s[:1])), default=None)
    # 1. Without measurements the prompt is handed off.
    if handing_off is None or computing is None or step_s is None:
        return 0
    # 2. Without a TPOT target a long prompt is handed off; a short one delays the streams little.
    if strictest_s is None and tokens > MAX_TOKENS_WITHOUT_TARGET:
        return 0
    # Time for the waiting prompts and this one, if no sequence is decoded meanwhile.
    local_s = computing.prefill_s(waiting_tokens) + computing.prefill_s(tokens, cached)
    # 3. Beside streams with a target each step computes as many prompt tokens as the target leaves time for.
    if decode.streams and strictest_s is not None:
        chunk = computing.tokens_within(strictest_s - step_s, prompt_tokens)
        # 3a. The target leaves too little time: the streams would miss it.
        if chunk < MIN_CHUNK_TOKENS:
            return 0
        # 3b. The prompts take this many steps, each as long as the target.
        local_s = max(local_s, math.ceil((waiting_tokens + tokens) / chunk) * strictest_s)
    # 4. The way that brings the first token sooner.
    queue_s = handing_off.token_s * prefill.queued_tokens if behind_queue else 0.0
    uncached_s = handing_off.prefill_s(prompt_tokens - cost.cached_tokens, cost.cached_tokens)
    return tokens if local_s < queue_s + uncached_s + cost.transfer_s else 0


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
    prompt is handed off. `mode` is the setting `local_prefill`. `behind_queue`: as for `local_prefill_tokens`."""
    if pair.decode is None:
        return 0
    if pair.is_own or mode == "always":
        return NO_LIMIT
    prefill, decode = loads.prefill.get(pair.prefill.key), loads.decode.get(pair.decode.key)
    if mode == "never" or prefill is None or decode is None:  # None: the worker is gone
        return 0
    return local_prefill_tokens(prefill, decode, prompt_tokens, pair.cost, tpot_s, behind_queue=behind_queue)
