"""Whether workers have capacity for one more request. Pure.

*Prefill.* A worker is sent as many tokens as it computes within a horizon. A long prompt counts for a part of the
horizon only: the rest is for short prompts, which the engine computes beside it. A worker has one long prompt at a
time.

*Decode.* KV for the prompt must be free now, because it is reserved before the prompt is computed. Beyond that the
decision uses predicted instead of present load: admitting by present load makes the pools alternate between idle and
overloaded (Qin et al., "Mooncake", section on early rejection based on prediction). Two quantities are predicted:

- the peak of KV as all sequences grow and end. With sequences sorted by remaining output, longest first, it is the
  maximum over i of the contexts of the first i plus i times the remaining output of the i-th (Gong et al.,
  "Past-Future Scheduler", ASPLOS 2025);
- the step time when the prompt arrives, by the worker's latency model, against the least TPOT target of the request and
  of the requests beside it.

Cheap upper bounds decide most cases; sequences are iterated over only near the limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.request.state import Entry
from coordinator.workers.load import DecodeLoad, Flight, PrefillLoad
from coordinator.workers.snapshot import WorkerKey
from splitserve.generation.kv_blocks import watermark_blocks
from splitserve.latency_model import DecodeLatency

LONG_SHARE = 0.6
"""Largest share of the horizon that a prompt counts for; a prompt with more tokens is long."""


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """No worker has capacity. `smaller_may_fit`: a shorter prompt might fit."""

    smaller_may_fit: bool


class PrefillCapacity:
    """Capacity of one model's prefill workers that take new requests."""

    def __init__(self, horizon_s: float) -> None:
        self.workers: dict[WorkerKey, PrefillLoad] = {}
        self.horizon_s = horizon_s

    def set_workers(self, loads: Iterable[PrefillLoad]) -> None:
        """Replaces the set of workers."""
        self.workers = {load.key: load for load in loads}

    @property
    def rate(self) -> float | None:
        """Prompt tokens per second of all workers together; None until one of them has measured its rate."""
        rates = [load.rate for load in self.workers.values() if load.measured_rate]
        return sum(rates) / len(rates) * len(self.workers) if rates else None

    @property
    def backlog_s(self) -> float:
        """Mean backlog of the workers, in seconds."""
        return sum(load.backlog_s for load in self.workers.values()) / max(1, len(self.workers))

    @property
    def least_busy(self) -> PrefillLoad | None:
        """The worker with the least backlog; None without workers."""
        return min(self.workers.values(), key=lambda load: load.backlog_s, default=None)

    def fit(self, flight: Flight) -> PrefillLoad | NoCapacity:
        """The worker with the least backlog that can start the request soon. Sets `flight.horizon_tokens`."""
        best: PrefillLoad | None = None
        smaller_may_fit = False
        for load in self.workers.values():
            horizon = load.rate * self.horizon_s
            tokens = min(flight.uncached_tokens, LONG_SHARE * horizon)
            if not _has_room(load, flight, tokens, horizon):
                smaller_may_fit |= tokens < flight.uncached_tokens
            elif best is None or load.backlog_s < best.backlog_s:
                best, flight.horizon_tokens = load, tokens
        return best if best is not None else NoCapacity(smaller_may_fit)


def _has_room(load: PrefillLoad, flight: Flight, tokens: float, horizon: float) -> bool:
    # 1. An idle worker takes anything.
    if not load.requests:
        return True
    if load.requests >= load.slots:
        return False
    # 2. A worker takes one long prompt at a time, however many shorter ones wait, so that they do not starve it.
    if tokens < flight.uncached_tokens:
        return not load.has_long
    return load.horizon_tokens + load.others + tokens <= horizon


class DecodeCapacity:
    """Capacity of one model's decode workers that take new requests.

    `tpot_slo_s` bounds the step time for requests that name no target of their own, None: no bound.
    """

    def __init__(self, tpot_slo_s: float | None) -> None:
        self.workers: dict[WorkerKey, DecodeLoad] = {}
        self._tpot_slo_s = tpot_slo_s

    def set_workers(self, loads: Iterable[DecodeLoad]) -> None:
        """Replaces the set of workers."""
        self.workers = {load.key: load for load in loads}

    def fit(self, entry: Entry, prefill_s: float) -> DecodeLoad | NoCapacity:
        """The least busy worker with capacity for an entry whose prompt reaches it in `prefill_s` seconds."""
        smaller_may_fit = False
        workers: Iterable[DecodeLoad] = self.workers.values()
        if len(self.workers) > 1:
            workers = sorted(workers, key=lambda load: load.requests / load.slots)
        for load in workers:
            # No worker is better than an idle one. The worker itself refuses a request that can never fit.
            if not load.requests or load.blocks_of(entry.prompt_tokens) > load.total_blocks:
                return load
            if load.requests >= load.slots or not self._keeps_pace(load, entry, prefill_s):
                continue
            if _has_blocks(load, entry):
                return load
            smaller_may_fit = True
        return NoCapacity(smaller_may_fit)

    def batch_limit(self, load: DecodeLoad, entry: Entry, context: float, output: float) -> float:
        """The most sequences of `context` tokens, with `output` to come, that the worker takes beside the entry."""
        limit = min(load.slots, load.total_blocks / load.blocks_of(context + output / 2) / load.shared)
        model = load.model
        bound_s = self._bound_s(load, model, entry) if model is not None else None
        if model is not None and bound_s is not None:
            sequence_s = model.sequence_s + model.context_token_s * context
            if sequence_s > 0:
                limit = min(limit, (bound_s - model.base_s) / sequence_s)
        return max(1.0, limit)

    def _keeps_pace(self, load: DecodeLoad, entry: Entry, prefill_s: float) -> bool:
        """Whether the step time will be within all TPOT targets on the worker when the prompt arrives."""
        model = load.model
        if model is None:
            return True
        count, context = load.requests + 1, load.context_tokens + entry.prompt_tokens
        least_s = entry.tpot_slo_s or self._tpot_slo_s or float("inf")
        if load.targets_s:
            least_s = min(least_s, load.targets_s[0])
        if model.decode_step_s(count, context) <= least_s:
            return True
        bound_s = self._bound_s(load, model, entry)
        if bound_s is None:
            return True
        # Too slow now: discount the sequences that will have ended when the prompt arrives.
        steps = prefill_s / max(model.decode_step_s(max(1, load.requests), load.context_tokens), 1e-4)
        ended = [other for other in load.flights if other.computed and other.remaining_output <= steps]
        count -= len(ended)
        context -= sum(other.context_tokens for other in ended)
        return count == 1 or model.decode_step_s(count, context) <= bound_s

    def _bound_s(self, load: DecodeLoad, model: DecodeLatency, entry: Entry) -> float | None:
        """The least TPOT target of the entry and of the sequences in flight; None without any.

        A target of a tenant or request that the worker could not keep even for that request alone does not count: it
        would empty the worker and still be missed. The target of the settings counts in any case.
        """
        kept = [
            other.tpot_slo_s
            for other in (entry, *(load.flights if load.targets_s else ()))
            if other.tpot_slo_s is not None
            and model.decode_step_s(1, other.context_tokens) <= other.tpot_slo_s
        ]
        if self._tpot_slo_s is not None and entry.tpot_slo_s not in kept:
            kept.append(self._tpot_slo_s)
        return min(kept, default=None)


def _has_blocks(load: DecodeLoad, entry: Entry) -> bool:
    """Whether KV suffices for the prompt now, and for the predicted peak of all sequences."""
    room = load.total_blocks - watermark_blocks(load.requests + 1, load.total_blocks) - load.other_blocks
    if load.blocks - load.other_blocks + load.blocks_of(entry.prompt_tokens) > room:
        return False
    # A cheap upper bound of the peak: no sequence has more output left than was expected of it.
    most = load.context_tokens + entry.prompt_tokens + load.expected + entry.expected_output
    if most / load.block_size * load.shared <= room:
        return True
    return _peak_tokens([*load.flights, entry]) / load.block_size * load.shared <= room


def _peak_tokens(flights: list[Flight]) -> float:
    """Peak KV tokens that the sequences hold together until all have ended, each growing by one token per step."""
    peak = held = 0.0
    longest_first = sorted(flights, key=lambda flight: flight.remaining_output, reverse=True)
    for count, flight in enumerate(longest_first, start=1):
        held += flight.context_tokens
        peak = max(peak, held + count * flight.remaining_output)
    return peak
