"""When a request would get its first token, and what a refused one is told. Pure."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

from coordinator.admission.decode_room import DecodeRoom
from coordinator.admission.entry import Entry
from coordinator.admission.prefill_room import PrefillRoom
from coordinator.admission.queue import Ahead

LEAST_RETRY_S = 0.1
MOST_RETRY_S = 60.0
_JITTER = 0.25
_NEW_SHARE = 0.05
_FADING_SHARE = 0.005
_MOST_BIAS = 4.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds. None where rates have not been measured: nothing is refused on a guess."""

    wait_s: float | None
    """Until a worker begins with the prompt."""
    queue_s: float
    """How much of it is spent in the queue, not on the worker."""
    compute_s: float
    """What the prompt then takes alone."""

    @property
    def ttft_s(self) -> float | None:
        """Until the first token."""
        return None if self.wait_s is None else self.wait_s + self.compute_s


def forecast(
    entry: Entry, ahead: Ahead, prefill: PrefillRoom, decode: DecodeRoom, bias: float, now: float
) -> Forecast:
    """The larger one of two waits, for each pool the work before the request over what the pool gets done.

    Prefill: tokens over tokens/s. Decode: as many sequences must end as are ahead, less those for which there is room.
    Those that run end when their remaining output has been made; after them, by Little's law, a worker with n sequences
    ends n / (output tokens x step) a second. `bias` is what such forecasts turned out to be wrong by.
    """
    rate = prefill.rate
    if rate is None:
        return Forecast(None, 0.0, 0.0)
    compute_s = entry.uncached_tokens * len(prefill.lanes) / rate
    wait_s = prefill.backlog_s(now) + ahead.uncached_tokens / rate
    queue_s = max(0.0, wait_s - prefill.horizon_s)
    if entry.needs_decode:
        decode_s = _decode_wait_s(entry, ahead, decode)
        wait_s, queue_s = max(wait_s, decode_s), max(queue_s, decode_s)
    return Forecast(wait_s * bias, queue_s * bias, compute_s)


def _decode_wait_s(entry: Entry, ahead: Ahead, decode: DecodeRoom) -> float:
    waiting = ahead.requests + 1
    output = max(1.0, (ahead.output_tokens + entry.expected_output) / waiting)
    free = ended_per_s = 0.0
    ends_s: list[float] = []
    for lane in decode.lanes.values():
        context = lane.context_tokens / len(lane.entries) if lane.entries else entry.prompt_tokens
        free += max(0.0, decode.batch_limit(lane, context, output) - lane.requests)
        if lane.measured:
            ended_per_s += lane.requests / (output * lane.step_s)
            ends_s += [other.remaining_output * lane.step_s for other in lane.entries]
    missing = math.ceil(waiting - free)
    if missing <= 0 or ended_per_s <= 0:
        return 0.0
    ends_s.sort()
    if missing <= len(ends_s):
        return ends_s[missing - 1]
    return (ends_s[-1] if ends_s else 0.0) + (missing - len(ends_s)) / ended_per_s


class Bias:
    """By how much forecasts are too low (above 1) or too high: an exponential mean over requests that waited."""

    def __init__(self) -> None:
        self.value = 1.0

    def learn(self, predicted_s: float, actual_s: float) -> None:
        """`predicted_s` is a forecast made without any bias."""
        if predicted_s > 0:
            ratio = min(max(actual_s / predicted_s, 1 / _MOST_BIAS), _MOST_BIAS)
            self.value += _NEW_SHARE * (ratio - self.value)

    def learn_at_least(self, predicted_s: float, waited_s: float) -> None:
        """A request gave up waiting: its forecast was too low by this factor or more."""
        if predicted_s > 0 and waited_s / predicted_s > self.value:
            self.learn(predicted_s, waited_s)

    def relax(self) -> None:
        """A request did not have to wait, or was refused: nothing was learned, and the bias fades."""
        self.value += _FADING_SHARE * (1.0 - self.value)


def retry_after_s(request_id: str, wait_s: float | None, limit_s: float) -> float:
    """Seconds until there would be room: until the forecast has fallen to the limit; 1 s where nothing is known.

    Bounded, and spread by the request id, so that those refused together do not come back together.
    """
    hint_s = 1.0 if wait_s is None else wait_s - limit_s
    spread = zlib.crc32(request_id.encode()) / 2**32
    hint_s *= 1 + _JITTER * (2 * spread - 1)
    return round(min(max(hint_s, LEAST_RETRY_S * (1 + spread)), MOST_RETRY_S), 3)
