"""How hard each side of a model's workers is pressed, from their reports and what admission holds. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.admission.entry import NOTHING_HELD, Held
from coordinator.routing.pair_choice import MARGIN, ROOM_SHARE
from coordinator.workers.load import DEFAULT_PREFILL_TOKENS_PER_S
from coordinator.workers.snapshot import PoolName, PoolSnapshot, Worker, WorkerKey
from engine.pacing.step_time_fit import DecodeStepFit
from splitserve.v1 import registry_pb2

WAIT_SHARE = 0.5
"""Of the target of a first token, what prompts may wait: the rest is for computing them and for what comes at once."""


@dataclass(frozen=True, slots=True)
class WorkerWork:
    """What one worker in rotation has to do, as it reports."""

    key: WorkerKey
    pool: PoolName
    """Where it leans."""
    neutral: bool
    prompt_s: float
    """Seconds of the prompt tokens that wait or are computed there, at its own rate."""
    streams: int
    context_tokens: int
    """KV tokens of those, and of prompts."""
    fit: DecodeStepFit | None = None
    step_s: float = 0.0
    """Its mean step, until there is a fit; 0: not measured."""
    prompt_tokens_per_s: float = 0.0
    """Its own rate of prompts; 0: not measured."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Work over capacity of the two sides; above 1 a side misses its target if nothing changes."""

    prefill: float
    decode: float

    def of(self, pool: PoolName) -> float:
        """That of one side."""
        return self.prefill if pool == "prefill" else self.decode


def work_of(worker: Worker, load: registry_pb2.WorkerLoad) -> WorkerWork:
    """A worker's work by its last report alone, which all coordinators see."""
    rate = load.prefill_tokens_per_second or DEFAULT_PREFILL_TOKENS_PER_S
    streams = load.streams if load.HasField("streams") else load.running_requests
    return WorkerWork(
        key=worker.key,
        pool=worker.pool,
        neutral=worker.neutral,
        prompt_s=load.waiting_tokens / rate,
        streams=streams if worker.decodes else 0,
        context_tokens=(load.referenced_blocks + load.reserved_blocks) * worker.block_size_tokens,
        fit=_fit(load),
        step_s=load.decode_step_ms / 1e3,
        prompt_tokens_per_s=load.prefill_tokens_per_second,
    )


def work_of_model(snapshot: PoolSnapshot, model: str) -> list[WorkerWork]:
    """The work of a base model's workers that take requests."""
    return [work_of(w, w.load) for w in snapshot.workers if w.model.name == model and w.accepts]


def pressure_on(
    works: Sequence[WorkerWork],
    ttft_s: float,
    tpot_s: float,
    held: Held = NOTHING_HELD,
    held_rate: float = 0.0,
) -> Pressure:
    """The pressure on both sides, as if each did all the work of its kind, wherever it is done now.

    prefill: seconds of all prompts that have no first token / (workers that lean to prefill * 0.5 * TTFT target)
    decode: step of all streams, spread over the workers that lean to decode / (0.85 * 0.9 * TPOT target)

    Workers may be of several classes: each counts by its own rate of prompts, and gets streams by how many it could
    have within the target.

    Work of the other side is counted because the pair policy moves what a side has no time for: looked at alone, a full
    side is never more than full. A side without workers has infinite pressure if it has work, else none.

    `held`: what admission holds back, for the side that it waits for: prompts at `held_rate` tokens a second (0: the
    default), or as many more streams as there are requests.
    """
    waits_for_prefill = held.cause == "prefill"
    speeds = _prompt_speeds(works)
    prompt_s = sum(work.prompt_s * speed for work, speed in zip(works, speeds, strict=True))
    if waits_for_prefill:
        prompt_s += held.uncached_tokens / (held_rate or DEFAULT_PREFILL_TOKENS_PER_S)
    prefills = sum(speed for work, speed in zip(works, speeds, strict=True) if work.pool == "prefill")
    prefill = _over(prompt_s, prefills * WAIT_SHARE * ttft_s)
    streams = sum(work.streams for work in works)
    more = 0 if waits_for_prefill else held.requests
    decodes = [work for work in works if work.pool == "decode"]
    if not decodes:
        return Pressure(prefill, float("inf") if streams + more else 0.0)
    if not streams + more:
        return Pressure(prefill, 0.0)
    context = sum(work.context_tokens for work in works if work.streams)
    context += round(more * context / streams) if streams else 0
    limit_s = ROOM_SHARE * MARGIN * tpot_s
    return Pressure(prefill, _spread_step_s(works, decodes, streams + more, context, limit_s) / limit_s)


def _prompt_speeds(works: Sequence[WorkerWork]) -> list[float]:
    """Each worker's rate of prompts over the mean; 1 for those that have not measured it."""
    rates = [work.prompt_tokens_per_s for work in works if work.prompt_tokens_per_s]
    mean = sum(rates) / len(rates) if rates else 1.0
    return [(work.prompt_tokens_per_s or mean) / mean for work in works]


def _spread_step_s(
    works: Sequence[WorkerWork], decodes: Sequence[WorkerWork], streams: int, context: int, limit_s: float
) -> float:
    """The mean step of these streams, seconds, each worker having as many as its part of what all could have in a step
    of `limit_s`; as measured where there is no fit."""
    known = [work.fit for work in works if work.fit is not None]
    if not known:
        steps = [work.step_s for work in decodes if work.step_s and work.streams]
        return sum(steps) / len(steps) if steps else 0.0
    count = len(known)
    mean = DecodeStepFit(
        sum(fit.base_s for fit in known) / count,
        sum(fit.sequence_s for fit in known) / count,
        sum(fit.context_token_s for fit in known) / count,
    )
    fits = [work.fit or mean for work in decodes]
    able = [
        max(0.0, limit_s - fit.base_s) / max(fit.step_s(1, context // streams) - fit.base_s, 1e-9)
        for fit in fits
    ]
    total = sum(able)
    parts = [one / total if total else 1 / len(fits) for one in able]
    return sum(
        part * fit.step_s(math.ceil(streams * part - 1e-9), int(context * part + 1e-9))
        for fit, part in zip(fits, parts, strict=True)
    )


def _over(work: float, capacity: float) -> float:
    if not work:
        return 0.0
    return work / capacity if capacity else float("inf")


def _fit(load: registry_pb2.WorkerLoad) -> DecodeStepFit | None:
    if not load.HasField("step_fit"):
        return None
    told = load.step_fit
    return DecodeStepFit(told.base_ms / 1e3, told.sequence_ms / 1e3, told.context_token_ms / 1e3)
