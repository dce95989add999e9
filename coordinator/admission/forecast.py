"""Forecasts of queueing time and TTFT, their learned bias, and what is refused by them, with retry hints. Pure."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

from coordinator.admission.decode_capacity import DecodeCapacity
from coordinator.admission.entry import Entry, Refusal, RefusalReason
from coordinator.admission.prefill_capacity import PrefillCapacity
from coordinator.admission.queue import AdmissionQueue, Ahead
from splitserve.config.coordinator import AdmissionConfig

LEAST_RETRY_S = 0.1
MOST_RETRY_S = 60.0
_JITTER = 0.25
"""Relative spread of retry hints."""
_NEW_SHARE = 0.05
"""Weight of a new observation in the bias."""
_FADING_SHARE = 0.005
"""How fast the bias returns to 1 without observations, per request."""
_MOST_BIAS = 4.0
_CAUTION = 0.85
"""Share of an allowed wait that a forecast may fill, because forecasts are right only on average."""
_LEAST_SLO_SHARE = 0.25
"""A prompt whose computation takes nearly all of the TTFT target, or more, may still wait for this share of it."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A forecast for one request, in seconds."""

    wait_s: float | None
    """Until a worker starts the prompt. None while no rate has been measured: requests are never refused on a guess."""
    queue_s: float
    """The part of `wait_s` spent in the coordinator's queue, not on the worker."""
    compute_s: float
    """Time to compute the prompt once started, and before that what reading its prefix takes longer than the wait."""

    @property
    def ttft_s(self) -> float | None:
        """Time until the first token."""
        return None if self.wait_s is None else self.wait_s + self.compute_s


def forecast(
    entry: Entry, ahead: Ahead, prefill: PrefillCapacity, decode: DecodeCapacity, bias: float, now: float
) -> Forecast:
    """The forecast for an entry with `ahead` queued before it: the longer of the waits for prefill and for decode.

    Each wait is the work ahead over the pool's throughput. Prefill: uncached tokens over tokens per second. Decode: as
    many sequences must end as are ahead, less those that fit now; running sequences end when their remaining output is
    done, and beyond those, by Little's law, a worker with n sequences completes n / (output tokens x step time) per
    second. The result is multiplied by `bias`, the learned ratio of actual to forecast waits. What a worker reads for
    the prompt from its lower tiers it reads while the prompt waits there, not here.
    """
    rate = prefill.rate
    if rate is None:
        return Forecast(None, 0.0, 0.0)
    compute_s = entry.uncached_tokens * len(prefill.workers) / rate
    wait_s = prefill.backlog_s(now) + ahead.uncached_tokens / rate
    queue_s = max(0.0, wait_s - prefill.horizon_s)
    if entry.needs_decode:
        decode_s = _decode_wait_s(entry, ahead, decode)
        wait_s, queue_s = max(wait_s, decode_s), max(queue_s, decode_s)
    read_s = max(0.0, entry.read_s - (wait_s - queue_s))
    return Forecast(wait_s * bias, queue_s * bias, read_s + compute_s)


def _decode_wait_s(entry: Entry, ahead: Ahead, decode: DecodeCapacity) -> float:
    waiting = ahead.requests + 1
    output = max(1.0, (ahead.output_tokens + entry.expected_output) / waiting)
    free = ended_per_s = 0.0
    ends_s: list[float] = []
    for load in decode.workers.values():
        context = load.context_tokens / len(load.flights) if load.flights else entry.prompt_tokens
        free += max(0.0, decode.batch_limit(load, entry, context, output) - load.requests)
        if step_s := load.measured_step_s:
            ended_per_s += load.requests / (output * step_s)
            ends_s += [other.remaining_output * step_s for other in load.flights]
    # Sequences that must end before this request fits: first those running, by their remaining output.
    missing = math.ceil(waiting - free)
    if missing <= 0 or ended_per_s <= 0:
        return 0.0
    ends_s.sort()
    if missing <= len(ends_s):
        return ends_s[missing - 1]
    return (ends_s[-1] if ends_s else 0.0) + (missing - len(ends_s)) / ended_per_s


class Bias:
    """The ratio of actual to forecast waits, as an exponential mean over requests that waited; above 1: too low."""

    def __init__(self) -> None:
        self.value = 1.0

    def learn(self, predicted_s: float, actual_s: float) -> None:
        """Learns from a completed wait. `predicted_s` is the forecast without bias; 0 is ignored."""
        if predicted_s > 0:
            ratio = min(max(actual_s / predicted_s, 1 / _MOST_BIAS), _MOST_BIAS)
            self.value += _NEW_SHARE * (ratio - self.value)

    def learn_at_least(self, predicted_s: float, waited_s: float) -> None:
        """Learns from a request that gave up waiting: its forecast was too low by at least this factor."""
        if predicted_s > 0 and waited_s / predicted_s > self.value:
            self.learn(predicted_s, waited_s)

    def relax(self) -> None:
        """A request did not wait or was refused: there is nothing to learn, and the bias fades towards 1."""
        self.value += _FADING_SHARE * (1.0 - self.value)


def retry_after_s(request_id: str, wait_s: float | None, limit_s: float) -> float:
    """Retry hint in seconds: until the forecast wait has fallen to the limit; about 1 s without a forecast.

    Bounded, and spread by a hash of the request id, so that requests refused together do not retry together.
    """
    hint_s = 1.0 if wait_s is None else wait_s - limit_s
    spread = zlib.crc32(request_id.encode()) / 2**32
    hint_s *= 1 + _JITTER * (2 * spread - 1)
    return round(min(max(hint_s, LEAST_RETRY_S * (1 + spread)), MOST_RETRY_S), 3)


def _slo_wait_s(entry: Entry, compute_s: float) -> float:
    """Seconds that a request may wait until its prompt starts, where being late is a reason to refuse it."""
    slo_s = entry.ttft_slo_s
    if slo_s is None or entry.resumed:
        return float("inf")
    return max(slo_s - compute_s, _LEAST_SLO_SHARE * slo_s)


def queue_limit_s(settings: AdmissionConfig, entry: Entry, compute_s: float) -> float:
    """Seconds that a request may stay queued; on its worker it may wait for another `prefill_horizon_s`."""
    slo_s = _slo_wait_s(entry, compute_s)
    return min(settings.max_queue_s, max(slo_s - settings.prefill_horizon_s, slo_s / 2))


def refusal_of(settings: AdmissionConfig, entry: Entry, predicted: Forecast, now: float) -> Refusal | None:
    """Why a request is refused when it comes, by what is forecast for it; None: it may wait."""
    if predicted.wait_s is None or entry.resumed:  # a forecast ends no answer that has begun
        return None
    left_s = entry.deadline_s - now
    slo_s = _CAUTION * min(settings.max_queue_s, _slo_wait_s(entry, predicted.compute_s))
    queue_s = _CAUTION * queue_limit_s(settings, entry, predicted.compute_s)
    if predicted.wait_s + predicted.compute_s > left_s:
        return _too_late(
            entry,
            "WOULD_MISS_DEADLINE",
            "begin",
            predicted.wait_s,
            max(0.0, left_s - predicted.compute_s),
        )
    if predicted.wait_s > slo_s:
        return _too_late(entry, "WOULD_MISS_SLO", "begin", predicted.wait_s, slo_s)
    if predicted.queue_s > queue_s:
        return _too_late(entry, "WOULD_MISS_SLO", "leave the queue", predicted.queue_s, queue_s)
    return None


def queue_full(queue: AdmissionQueue, entry: Entry, predicted: Forecast) -> Refusal:
    """The refusal of a request for which the queue has no place."""
    message = f"{queue.requests} requests with {queue.prompt_tokens} prompt tokens are waiting"
    # Half of the wait: a client that returns to a queue with only one place free is soon refused again.
    wait_s = None if predicted.wait_s is None else predicted.wait_s / 2
    return Refusal(entry, "QUEUE_FULL", message, retry_after_s(entry.request_id, wait_s, 0.0))


def _too_late(entry: Entry, reason: RefusalReason, what: str, wait_s: float, limit_s: float) -> Refusal:
    message = f"a prompt would {what} in {wait_s:.3g} s; at most {limit_s:.3g} s are allowed"
    return Refusal(entry, reason, message, retry_after_s(entry.request_id, wait_s, limit_s))
