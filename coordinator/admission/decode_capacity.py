"""Whether decode workers have capacity for one more request, at the time when its prompt will reach them. Pure.

KV for the prompt must be free now, because it is reserved before the prompt is computed. Beyond that the decision uses
predicted instead of present load: admitting by present load makes the pools alternate between idle and overloaded (Qin
et al., "Mooncake", section on early rejection based on prediction). Two quantities are predicted:

- the peak of KV as all sequences grow and end. With sequences sorted by remaining output, longest first, it is the
  maximum over i of the contexts of the first i plus i times the remaining output of the i-th (Gong et al.,
  "Past-Future Scheduler", ASPLOS 2025);
- the step time when the prompt arrives, from the worker's own model of its step time, against the least TPOT target of
  the request and of those that it would run beside.

Cheap upper bounds decide most cases; sequences are iterated over only near the limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from coordinator.admission.entry import CLASSES, RANK, Entry
from coordinator.request.caller import PriorityClass
from coordinator.workers.load import DecodeLoad, Flight
from coordinator.workers.snapshot import WorkerKey
from splitserve.generation.kv_blocks import watermark_blocks
from splitserve.v1 import registry_pb2

SEEN_LATELY_S = 30.0
"""How long headroom is kept for a priority class after its last request."""
LATE_SPARE = 0.1
"""Share of a worker's streams that is left to requests which can still be in time, of what their pace allows."""
LATE_PATIENCE_S = 10.0
"""A late request that has waited for so long takes that, too, so that none starves."""


@dataclass(frozen=True, slots=True)
class NoDecodeCapacity:
    """No worker has capacity. `smaller_may_fit`: a shorter prompt might fit; `held_by_late`: one that can still be in
    time might."""

    smaller_may_fit: bool
    held_by_late: bool = False


class DecodeCapacity:
    """Capacity of one model's decode workers that take new requests.

    `tpot_slo_s` bounds the step time for requests that name no target of their own, None: no bound; `headroom` is the
    share of slots and KV kept for higher classes.
    """

    def __init__(self, tpot_slo_s: float | None, headroom: float) -> None:
        self.workers: dict[WorkerKey, DecodeLoad] = {}
        self._stand_ins: tuple[DecodeLoad, ...] = ()
        self._tpot_slo_s = tpot_slo_s
        self._headroom = headroom
        self._seen_s: dict[PriorityClass, float] = {}

    def set_workers(self, loads: Iterable[DecodeLoad], stand_ins: Iterable[DecodeLoad] = ()) -> None:
        """Replaces the set of workers. `stand_ins`, which lean to prefill, take what has a target and fits nowhere
        else."""
        self.workers = {load.key: load for load in loads}
        self._stand_ins = tuple(load for load in stand_ins if load.key not in self.workers)

    def on_arrival(self, priority_class: PriorityClass, now: float) -> None:
        """Records the arrival of a request of this class."""
        self._seen_s[priority_class] = now

    def fit(
        self, entry: Entry, prefill_s: float, now: float, *, is_paced: bool = False
    ) -> DecodeLoad | NoDecodeCapacity:
        """The least busy worker with capacity for an entry whose prompt reaches it in `prefill_s` seconds. `is_paced`:
        the worker computes it itself, when the streams that it has leave it time; no stand-in does.

        An answer holds its place for seconds. A late request that took the last one would make late those that come
        meanwhile, and a first token that is late already loses little by waiting on.
        """
        headroom = self._headroom_against(entry.priority_class, now)
        is_late = entry.due_s < now + prefill_s and now - entry.arrived_s < LATE_PATIENCE_S
        held_by_late = False
        smaller_may_fit = False
        workers: Iterable[DecodeLoad] = self.workers.values()
        if len(self.workers) > 1:
            workers = sorted(workers, key=_busy)
        if self._stand_ins and not is_paced and entry.due_s < float("inf"):
            workers = chain(workers, sorted(self._stand_ins, key=_busy))
        for load in workers:
            # An idle worker is as good as it gets, and the worker itself refuses what can never fit.
            if not load.requests or load.blocks_of(entry.prompt_tokens) > load.total_blocks:
                return load
            if load.requests + 1 > max(1.0, load.slots * (1 - headroom)):
                continue
            spare = int(LATE_SPARE * (load.requests + 1)) if is_late else 0
            if not is_paced and not self._keeps_pace(load, entry, prefill_s, spare):
                held_by_late = held_by_late or (spare > 0 and self._keeps_pace(load, entry, prefill_s, 0))
                continue
            if self._has_blocks(load, entry, headroom):
                return load
            smaller_may_fit = True
        return NoDecodeCapacity(smaller_may_fit, held_by_late and not smaller_may_fit)

    @property
    def place_s(self) -> float:
        """Seconds from the end of one answer to that of the next, in the mean, of those of this coordinator; 0 while
        unknown."""
        ended_per_s = sum(
            len(load.flights) ** 2 / (load.expected * step_s)
            for load in self.workers.values()
            if load.expected and (step_s := load.measured_step_s)
        )
        return 1 / ended_per_s if ended_per_s else 0.0

    def batch_limit(self, load: DecodeLoad, entry: Entry, context: float, output: float) -> float:
        """How many sequences of `context` tokens, with `output` to come, the worker takes with the entry, at most."""
        limit = min(load.slots, load.total_blocks / load.blocks_of(context + output / 2) / load.shared)
        fit = load.fit
        bound_s = self._bound_s(load, fit, entry) if fit is not None else None
        if fit is not None and bound_s is not None:
            each_ms = fit.sequence_ms + fit.context_token_ms * context
            if each_ms > 0:
                limit = min(limit, (bound_s * _speedup(load) * 1e3 - fit.base_ms) / each_ms)
        return max(1.0, limit)

    def _headroom_against(self, priority_class: PriorityClass, now: float) -> float:
        """Share of capacity kept from a class, 0..1: the headroom while a higher class is active."""
        higher = CLASSES[: RANK[priority_class]]
        lately = any(now - self._seen_s.get(name, -SEEN_LATELY_S) < SEEN_LATELY_S for name in higher)
        return self._headroom if lately else 0.0

    def _has_blocks(self, load: DecodeLoad, entry: Entry, headroom: float) -> bool:
        """Whether KV suffices for the prompt now, and for the predicted peak of all sequences."""
        watermark = watermark_blocks(load.requests + 1, load.total_blocks)
        room = load.total_blocks * (1 - headroom) - watermark - load.other_blocks
        if load.blocks - load.other_blocks + load.blocks_of(entry.prompt_tokens) > room:
            return False
        # A cheap upper bound of the peak: no sequence has more output left than was expected of it.
        most = load.context_tokens + entry.prompt_tokens + load.expected + entry.expected_output
        if most / load.block_size * load.shared <= room:
            return True
        return _peak_tokens([*load.flights, entry]) / load.block_size * load.shared <= room

    def _keeps_pace(self, load: DecodeLoad, entry: Entry, prefill_s: float, spare: int) -> bool:
        """Whether the step time will be within all their TPOT targets when the prompt arrives, with `spare` streams
        more like those that there are."""
        fit = load.fit
        if fit is None:
            return True
        requests, context_tokens = load.requests, load.context_tokens
        if load.host_peer is not None:  # its clock holds back the prompts that it is to compute
            held = [
                one for one in load.flights if isinstance(one, Entry) and one.on_host and not one.computed
            ]
            requests -= len(held)
            context_tokens -= sum(one.context_tokens for one in held)
        more = 1 + spare / max(1, requests)
        count, context = requests + 1 + spare, context_tokens * more + entry.prompt_tokens
        least_s = entry.tpot_slo_s or self._tpot_slo_s or float("inf")
        if load.targets_s:
            least_s = min(least_s, load.targets_s[0])
        if _step_s(fit, count, context) <= least_s * _speedup(load):
            return True
        bound_s = self._bound_s(load, fit, entry)
        if bound_s is None:
            return True
        # Too slow now: discount the sequences that will have ended when the prompt arrives.
        steps = prefill_s / max(load.step_s, 1e-4)
        ended = [other for other in load.flights if other.computed and other.remaining_output <= steps]
        count -= len(ended)
        context -= sum(other.context_tokens for other in ended)
        return count == 1 or _step_s(fit, count, context) <= bound_s * _speedup(load)

    def _bound_s(self, load: DecodeLoad, fit: registry_pb2.DecodeStepFit, entry: Entry) -> float | None:
        """The least target of the entry and of those in flight that each of them could keep alone; None: there is none.

        A target of a tenant or request that nobody can keep binds nobody: it would empty the worker and be missed. The
        settings' one binds all the same.
        """
        kept = [
            other.tpot_slo_s
            for other in (entry, *(load.flights if load.targets_s else ()))
            if other.tpot_slo_s is not None and _step_s(fit, 1, other.context_tokens) <= other.tpot_slo_s
        ]
        if self._tpot_slo_s is not None and entry.tpot_slo_s not in kept:
            kept.append(self._tpot_slo_s)
        return min(kept, default=None)


def _speedup(load: DecodeLoad) -> float:
    """How many times as fast as by its fit a worker's steps are; see `WorkerLoad.decode_speedup`."""
    return max(1.0, load.report.decode_speedup)


def _step_s(fit: registry_pb2.DecodeStepFit, requests: int, context: float) -> float:
    return (fit.base_ms + fit.sequence_ms * requests + fit.context_token_ms * context) / 1e3


def _busy(load: DecodeLoad) -> float:
    return load.requests / load.slots


def _peak_tokens(flights: list[Flight]) -> float:
    """Peak KV tokens that the sequences hold together until all have ended, each growing by one token per step."""
    peak = held = 0.0
    for count, flight in enumerate(sorted(flights, key=_remaining, reverse=True), start=1):
        held += flight.context_tokens
        peak = max(peak, held + count * flight.remaining_output)
    return peak


def _remaining(flight: Flight) -> float:
    return flight.remaining_output
