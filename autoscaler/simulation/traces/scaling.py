"""Scales a trace so that its peak needs a wanted number of replicas, without touching its time axis."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.traces.trace import MOST_REQUESTS, Trace, TraceRequest
from splitserve.errors import InvalidArgumentError

PEAK_WINDOW_S = 60.0
"""A peak is the busiest minute's mean."""
JITTER_S = 120.0
"""Copies move by at most this time either way; longer variations keep their shape."""


def peak_replicas(trace: Trace, engine: EngineModel, tpot_s: float) -> float:
    """Replicas of both pools together that the busiest minute keeps fully busy at the TPOT target: seconds of work that
    arrive a second, of computing prompts and of full batches (`decode_claim`)."""
    bins = math.floor(trace.duration_s / PEAK_WINDOW_S) + 1
    work = np.zeros(bins)
    for request in trace.requests:
        work[int(request.arrival_s // PEAK_WINDOW_S)] += sum(pool_work_s([request], engine, tpot_s))
    return float(work.max() / PEAK_WINDOW_S)


def decode_claim(engine: EngineModel, request: TraceRequest, tpot_s: float) -> tuple[float, float]:
    """(share of one decode replica that a request takes, for how many seconds) in a fully used replica.

    A replica is full with B such requests when its step takes as long as the TPOT target, its KV is used up, or its
    batch has no free slot. The request takes 1/B of the replica for as many such steps as it has tokens to decode.
    """
    context = request.prompt_tokens + request.output_tokens / 2
    step = engine.decode
    each_s = step.sequence_s + step.context_token_s * context
    by_time = max(0.0, tpot_s - step.base_s) / each_s if each_s > 0 else math.inf
    by_kv = engine.kv_capacity_tokens / (request.prompt_tokens + request.output_tokens)
    batch = max(1.0, min(by_time, by_kv, engine.max_running_requests))
    return 1 / batch, (request.output_tokens - 1) * (step.base_s + each_s * batch)


def scaled(trace: Trace, factor: float, seed: int = 0, jitter_s: float = JITTER_S) -> Trace:
    """The trace with its arrival rate times `factor`.

    Each request comes floor(factor) or ceil(factor) times, at random so that `factor` is the mean. Each copy moves by
    up to `jitter_s` either way, as for more users who behave alike, but not in lock-step. The copies share no prefix.
    The jitter smooths bursts that are shorter; longer ones keep their shape. Raises InvalidArgumentError
    (TRACE_TOO_LONG) for more than `MOST_REQUESTS`.
    """
    if (requests := len(trace.requests) * factor) > MOST_REQUESTS:
        message = f"scale: {requests:.3g} requests are more than {MOST_REQUESTS}: cut the trace"
        raise InvalidArgumentError(message, reason="TRACE_TOO_LONG", field="scale")
    chance = random.Random(seed)
    last_s = trace.duration_s
    copies: list[TraceRequest] = []
    for request in trace.requests:
        whole = math.floor(factor)
        times = whole + (chance.random() < factor - whole)
        for copy in range(times):
            moved_s = request.arrival_s + (chance.uniform(-jitter_s, jitter_s) if factor > 1 else 0.0)
            # Copies of the first and last requests are reflected at the trace's ends.
            moved_s = abs(moved_s) if moved_s <= last_s else 2 * last_s - moved_s
            blocks = tuple(block * math.ceil(factor) + copy for block in request.block_ids)
            copies.append(
                TraceRequest(max(0.0, moved_s), request.prompt_tokens, request.output_tokens, blocks)
            )
    copies.sort(key=lambda request: request.arrival_s)
    return Trace(trace.name, copies)


def scaled_to_peak(trace: Trace, replicas: float, engine: EngineModel, tpot_s: float, seed: int = 0) -> Trace:
    """Scales the arrival rate so that the busiest minute, jitter included, fills `replicas` replicas."""
    factor = replicas / peak_replicas(trace, engine, tpot_s)
    smoothed = peak_replicas(scaled(trace, factor, seed), engine, tpot_s)
    return scaled(trace, factor * replicas / smoothed, seed)


def pool_work_s(requests: Sequence[TraceRequest], engine: EngineModel, tpot_s: float) -> tuple[float, float]:
    """Seconds of a fully used replica that the requests take: (of prefill, of decode)."""
    prefill = decode = 0.0
    for request in requests:
        share, busy_s = decode_claim(engine, request, tpot_s)
        prefill += engine.prompt_s(request.prompt_tokens)
        decode += share * busy_s
    return prefill, decode


def busiest(trace: Trace, requests: int, engine: EngineModel, tpot_s: float) -> Trace:
    """The `requests` consecutive requests with the most work a second; the first of them arrives at 0."""
    if len(trace.requests) <= requests:
        return trace
    work = np.cumsum([0.0, *(sum(pool_work_s([request], engine, tpot_s)) for request in trace.requests)])
    arrivals = np.array([request.arrival_s for request in trace.requests])
    spans = np.maximum(arrivals[requests - 1 :] - arrivals[: len(arrivals) - requests + 1], 1e-3)
    first = int(np.argmax((work[requests:] - work[:-requests]) / spans))
    began_s = trace.requests[first].arrival_s
    cut = trace.requests[first : first + requests]
    return Trace(trace.name, [replace(request, arrival_s=request.arrival_s - began_s) for request in cut])
