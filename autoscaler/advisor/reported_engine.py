"""The engine model that a cluster's own reports describe. Pure, except for reading a model's file.

Decode steps are those that the workers have fitted. Prompts are fitted here, by least squares over the recorded
requests that did not wait: a base for each step, a time for each token and for its attention. Without such requests
the workers' measured rate of prompt tokens takes their place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoscaler.advisor.recorded_traffic import MeasuredRequest, RecordedTraffic, traffic_of
from autoscaler.simulation.traces.trace import is_recording, read_trace
from autoscaler.sizing.engine_model import EngineModel
from autoscaler.sizing.engine_model_file import FIELD, engine_model_of
from splitserve.errors import FailedPreconditionError

LEAST_PROMPTS = 8
"""Fewer prompts that did not wait are not fitted."""
_WAITED = 0.1
"""A prompt has waited if its time in the queue is longer than this share of its computation."""
_OUTLIER = 3.0
"""Prompts that took this multiple of what the fit says shared their steps, and are left out of a second fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReportedEngine:
    """A model, and what it leaves open, one line each."""

    model: EngineModel
    notes: Sequence[str] = ()


Costs = dict[str, Any]
"""Some fields of an EngineModel, seconds."""


def reported_engine(traffic: RecordedTraffic) -> ReportedEngine:
    """The engine model of the recorded cluster. Raises FailedPreconditionError (NO_REPORTS) naming what is missing."""
    workers, notes = traffic.workers, []
    if not workers:
        message = (
            "the trace has no reports of workers: record it with `splitserve record`, or give --engine-model"
        )
        raise FailedPreconditionError(message, reason="NO_REPORTS", field="trace")
    known = EngineModel()
    decode = _decode_steps(workers, traffic.requests)
    if decode["sequence_s"] == 0 and decode["context_token_s"] == 0:
        notes.append("decode steps did not vary enough to tell what a sequence or its context costs")
    prompts = _alone(traffic.requests)
    if len(prompts) >= LEAST_PROMPTS:
        prefill = fitted_prompts(prompts)
    else:
        notes.append("too few prompts found an idle worker: the prefill rate is the workers' mean")
        prefill = {"prefill_token_s": 1 / _rate(workers), "prefill_token2_s": 0.0, "prefill_step_s": 0.0}
    handoffs = [request.handoff_s for request in traffic.requests if request.handoff_s > 0]
    model = EngineModel(
        max_step_tokens=_least(workers, "max_step_tokens", known.max_step_tokens),
        max_running_requests=_least(workers, "max_running_requests", known.max_running_requests),
        kv_capacity_tokens=_least(workers, "kv_capacity_tokens", known.kv_capacity_tokens),
        kv_bytes_per_token=_least(workers, "kv_bytes_per_token", known.kv_bytes_per_token),
        link_gb_per_s=_lane(workers, known.link_gb_per_s),
        handoff_s=median(handoffs) if handoffs else known.handoff_s,
        request_s=_around(traffic.requests),
    )
    return ReportedEngine(dataclasses.replace(model, **prefill, **decode), notes)


def fitted_prompts(prompts: Sequence[MeasuredRequest]) -> Costs:
    """Times of a step, a token and its attention, all at least 0, from prompts that were computed alone."""
    rows = np.array(
        [
            (p.chunks, p.prompt_tokens - p.cached_tokens, p.prompt_tokens**2 - p.cached_tokens**2)
            for p in prompts
        ],
        dtype=np.float64,
    )
    took_s = np.array([prompt.compute_s for prompt in prompts])
    found = _least_squares(rows, took_s)
    kept = took_s <= _OUTLIER * np.maximum(rows @ found, 1e-6)
    if kept.sum() >= LEAST_PROMPTS:
        found = _least_squares(rows[kept], took_s[kept])
    base, token, square = map(float, found)
    return {"prefill_step_s": base, "prefill_token_s": token, "prefill_token2_s": square}


def _least_squares(rows: NDArray[np.float64], took_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The best fit without a negative cost: that of the set of columns whose own fit has none. Weighted by 1 / time."""
    weights = 1 / np.maximum(took_s, 1e-6)
    best, least = np.zeros(3), math.inf
    for count in (1, 2, 3):
        for columns in combinations(range(3), count):
            picked = list(columns)
            scale = np.maximum(rows[:, picked].max(axis=0), 1e-12)
            matrix = rows[:, picked] / scale * weights[:, None]
            solved, *_ = np.linalg.lstsq(matrix, took_s * weights, rcond=None)
            error = float(np.square(matrix @ solved - took_s * weights).sum())
            if (solved >= 0).all() and error < least * (1 - 1e-9):
                least, best = error, np.zeros(3)
                best[picked] = solved / scale
    return best


def _alone(requests: Sequence[MeasuredRequest]) -> list[MeasuredRequest]:
    return [
        request
        for request in requests
        if request.completed
        and request.chunks
        and request.compute_s > 0
        and request.queue_s <= _WAITED * request.compute_s
    ]


def _decode_steps(workers: Sequence[Mapping[str, Any]], requests: Sequence[MeasuredRequest]) -> Costs:
    decoding = [worker for worker in workers if worker.get("pool") == "decode"]
    fits = [worker["step_fit"] for worker in decoding if worker.get("step_fit")]
    if fits:
        return {
            "step_s": fmean(fit["base_ms"] for fit in fits) / 1e3,
            "sequence_s": fmean(fit["sequence_ms"] for fit in fits) / 1e3,
            "context_token_s": fmean(fit["context_token_ms"] for fit in fits) / 1e3,
        }
    steps = [worker["decode_step_ms"] / 1e3 for worker in decoding if worker.get("decode_step_ms")]
    steps = steps or [request.tpot_s for request in requests if request.tpot_s > 0]
    if not steps:
        message = "no worker has measured a decode step: record while there is traffic"
        raise FailedPreconditionError(message, reason="NO_REPORTS", field="trace")
    return {"step_s": median(steps), "sequence_s": 0.0, "context_token_s": 0.0}


def _rate(workers: Sequence[Mapping[str, Any]]) -> float:
    rates = [worker["prefill_tokens_per_second"] for worker in workers if worker.get("pool") == "prefill"]
    rates = [rate for rate in rates if rate > 0]
    if not rates:
        message = "no worker has measured how fast it computes prompts: record while there is traffic"
        raise FailedPreconditionError(message, reason="NO_REPORTS", field="trace")
    return fmean(rates)


def _least(workers: Sequence[Mapping[str, Any]], key: str, default: int) -> int:
    values = [int(worker[key]) for worker in workers if worker.get(key)]
    return min(values) if values else default


def _lane(workers: Sequence[Mapping[str, Any]], default: float) -> float:
    lanes = [float(worker["lane_gb_per_second"]) for worker in workers if worker.get("lane_gb_per_second")]
    return median(lanes) if lanes else default


def _around(requests: Sequence[MeasuredRequest]) -> float:
    """What a TTFT has beside waits and computation: the prompt's and the first token's ways."""
    rests = [
        request.ttft_s - request.wait_s - request.queue_s - request.compute_s
        for request in requests
        if request.ttft_s is not None and request.compute_s > 0
    ]
    return max(0.0, median(rests)) if rests else 0.0


def measured_engine(path: Path) -> ReportedEngine:
    """The engine model of a JSON file, or that which a recording of `splitserve record` describes.

    Raises InvalidArgumentError, FailedPreconditionError.
    """
    text = read_trace(path, FIELD)
    if is_recording(text):
        return reported_engine(traffic_of(path, text))
    return ReportedEngine(engine_model_of(path, text))
