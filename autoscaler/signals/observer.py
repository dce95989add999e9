"""The senses of the autoscaler: asks all coordinators, remembers a window, and makes a `Snapshot`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import astuple
from typing import Protocol

from autoscaler.actuators.actuator import ActualReplica, counted, where_they_lean
from autoscaler.signals.arrival_log import ArrivalLog
from autoscaler.signals.cold_starts import ColdStarts, start_phases, wake_s
from autoscaler.signals.ended_replicas import EndedReplicas
from autoscaler.signals.history_file import MAX_BUCKETS, ForecastHistory
from autoscaler.signals.totals import CoordinatorTrack, DemandCounts, Totals, totals_of
from autoscaler.signals.worker_view import (
    Sighting,
    by_class,
    context_tokens,
    kv_bytes_per_token,
    kv_capacity_tokens,
    lane_gb_per_s,
    max_running_requests,
    merged,
    of_pool,
    prefill_tokens_per_s,
    replicas,
    serving,
    step_fit,
    with_served,
)
from autoscaler.snapshot import (
    DecodeSignals,
    LinkSignals,
    PrefillSignals,
    Snapshot,
)
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.histograms import LATENCY_BOUNDS_S, Histogram
from splitserve.logs import log_event
from splitserve.v1 import registry_pb2, scaling_pb2

DEFAULT_WINDOW_S = 60.0
DEFAULT_HISTORY_S = 900.0
MAX_FOREIGN = 10_000
"""Names of other models' workers that are remembered."""

Replicas = Callable[[], Awaitable[Sequence[ActualReplica]]]
OnEnded = Callable[[Sequence[tuple[str, int]]], Awaitable[None]]
"""Takes (worker id, epoch) pairs."""


class SignalSource(Protocol):
    """One coordinator; `splitserve.client.scaling_client.ScalingClient` is one."""

    target: str

    async def signals(self, model: str = "") -> scaling_pb2.GetSignalsResponse:
        """Its signals. Raises SplitserveError."""


async def _no_replicas() -> Sequence[ActualReplica]:
    return ()


class Observer:
    """Polls all coordinators at each `observe`; nothing runs in between. Memory is bounded by `history_s`.

    The caller closes `sources`. `on_ended` is told of boots whose replicas are listed no more; give it only where that
    proves that they have ended. `replicas` lists the actuator's replicas; other workers are included as well.
    Histograms cover `window_s`, arrivals up to `history_s`. An empty `model` sums all models; with one, the workers of
    the others are only named (`Snapshot.foreign`).

    For a coordinator that does not answer, its last figures and mean demand count for `window_s`, then they are
    missing. In both cases the snapshot is not `complete`.
    """

    def __init__(
        self,
        sources: Sequence[SignalSource],
        replicas: Replicas = _no_replicas,
        *,
        model: str = "",
        window_s: float = DEFAULT_WINDOW_S,
        history_s: float = DEFAULT_HISTORY_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        on_ended: OnEnded | None = None,
    ) -> None:
        self._on_ended, self._ended = on_ended, EndedReplicas()
        self._sources = tuple(sources)
        self._replicas = replicas
        self._model = model
        self._window_s = window_s
        self._clock, self._wall_clock = clock, wall_clock
        self._tracks = {source.target: CoordinatorTrack(window_s) for source in self._sources}
        self._log = ArrivalLog(max(history_s, window_s))
        self._cold_starts = ColdStarts()
        self._foreign: dict[str, None] = {}
        self.served: dict[str, registry_pb2.ServedModel] = {}
        """The models that coordinators know, as their workers last served them; kept while a coordinator does not."""

    def keep_history(self, history_s: float) -> None:
        """From now on keeps the arrivals of this many seconds."""
        self._log.history_s = max(history_s, self._window_s)

    def wall_s(self) -> float:
        """Now, seconds since the epoch."""
        return self._wall_clock()

    @property
    def ahead_s(self) -> float:
        """Seconds since the epoch at time 0 of the clock of snapshots."""
        return self._wall_clock() - self._clock()

    def history(self) -> ForecastHistory:
        """See `Remembering`."""
        ahead_s = self.ahead_s
        rows = [(start + ahead_s, end + ahead_s, demand) for start, end, demand in self._log.rows()]
        return ForecastHistory(
            model=self._model,
            saved_wall_s=self._wall_clock(),
            arrivals=tuple((start, end, *astuple(demand)) for start, end, demand in rows[-MAX_BUCKETS:]),
            cold_starts_s=self._cold_starts.measured(),
        )

    def remember(self, history: ForecastHistory) -> None:
        """See `Remembering`."""
        ahead_s, now = self.ahead_s, self._clock()
        rows = [(row[0] - ahead_s, row[1] - ahead_s, DemandCounts(*row[2:])) for row in history.arrivals]
        self._log.restore([(start, end, demand) for start, end, demand in rows if end <= now])
        self._cold_starts.remember(history.cold_starts_s)

    async def observe(self) -> Snapshot:
        """Takes a snapshot. Raises UnavailableError (NO_COORDINATOR) when none answers, and what `replicas` raises."""
        answers = await asyncio.gather(*(self._ask(source) for source in self._sources))
        listed = await self._replicas()
        answered = [answer for answer in answers if answer is not None]
        if not answered:
            named = ", ".join(source.target for source in self._sources)
            raise UnavailableError(f"no coordinator answers: {named}", reason="NO_COORDINATOR")
        if self._on_ended is not None and (ended := self._ended.look(_names(listed), _boots(answered))):
            await self._on_ended(ended)
        now, wall = self._clock(), self._wall_clock()
        self._log.look(now)
        for target, response, at_s in answered:
            increment = self._tracks[target].take(response, totals_of(self._models(response)), at_s)
            if increment is not None:
                self._log.add(increment.start_s, increment.end_s, increment.totals.demand)
        self._learn_foreign(answered)
        known = [model for _, answer, _ in answered for model in self._models(answer)]
        self.served = with_served(self.served, known)
        actual = [replica for replica in listed if replica.name not in self._foreign]
        return self._snapshot(actual, now, wall, complete=len(answered) == len(self._sources))

    def _learn_foreign(self, answers: Sequence[tuple[str, scaling_pb2.GetSignalsResponse, float]]) -> None:
        """Remembers the workers of other models, also while they are not registered: nobody then says whose they are.

        Their names are forgotten once another model has taken them, and the oldest beyond a bound.
        """
        if not self._model:
            return
        for _, response, _ in answers:
            for model in response.models:
                for worker in model.workers:
                    self._foreign.pop(worker.worker_id, None)
                    if model.model != self._model:
                        self._foreign[worker.worker_id] = None
        while len(self._foreign) > MAX_FOREIGN:
            del self._foreign[next(iter(self._foreign))]

    async def _ask(self, source: SignalSource) -> tuple[str, scaling_pb2.GetSignalsResponse, float] | None:
        try:
            # Of all models: the workers of the others must be known, in order to be left alone.
            response = await source.signals()
        except SplitserveError as error:
            log_event("signals.missing", coordinator=source.target, reason=error.reason, error=error.message)
            return None
        if tuple(response.bounds_seconds) != LATENCY_BOUNDS_S:
            why = "its histograms have other bounds: another version"
            log_event("signals.missing", coordinator=source.target, reason="VERSION_MISMATCH", error=why)
            return None
        return source.target, response, self._clock()

    def _snapshot(
        self, actual: Sequence[ActualReplica], now: float, wall: float, *, complete: bool
    ) -> Snapshot:
        held = [track for track in self._tracks.values() if self._is_held(track, now)]
        models = [(self._models(track.last), track.last_s) for track in held if track.last and track.last_s]
        seen = merged(models)
        since = {name: (worker.state, wall - (now - worker.since_s)) for name, worker in seen.items()}
        leanings = {name: worker.pool for name, worker in seen.items() if worker.signals.neutral}
        actual = where_they_lean(counted(actual, seen), leanings)
        self._cold_starts.look(actual, since)
        totals = _sum(track.window(now) for track in held)
        here = [model for answer, _ in models for model in answer]
        return Snapshot(
            now_s=now,
            prefill=self._prefill(seen, here, totals, actual, now, wall),
            decode=self._decode(seen, here, totals, actual, now, wall),
            link=_link(seen, totals),
            arrivals=self._log.buckets([(t.last_s, t.demand_per_s(now)) for t in held if t.last_s]),
            window_s=self._window_s,
            wall_s=wall,
            complete=complete,
            waiting_for_workers=sum(model.in_progress.waiting_for_workers for model in here),
            in_progress=sum(_in_progress(model.in_progress) for model in here),
            model_known=bool(self.served),
            foreign=frozenset(self._foreign),
            metrics=_metrics(seen, here),
        )

    def _is_held(self, track: CoordinatorTrack, now: float) -> bool:
        return track.last_s is not None and now - track.last_s <= self._window_s

    def _models(self, response: scaling_pb2.GetSignalsResponse) -> list[scaling_pb2.ModelSignals]:
        return [model for model in response.models if not self._model or model.model == self._model]

    def _prefill(
        self,
        seen: dict[str, Sighting],
        models: Sequence[scaling_pb2.ModelSignals],
        totals: Totals | None,
        actual: Sequence[ActualReplica],
        now: float,
        wall: float,
    ) -> PrefillSignals:
        workers = serving("prefill", seen)
        return PrefillSignals(
            replicas=replicas("prefill", seen, actual, now, wall),
            waiting_requests=sum(model.in_progress.prefilling_requests for model in models),
            backlog_tokens=round(sum(model.in_progress.prefilling_tokens for model in models)),
            tokens_per_s=prefill_tokens_per_s(workers),
            latency=_phase(totals, scaling_pb2.PHASE_PREFILL),
            ttft=_phase(totals, scaling_pb2.PHASE_TTFT),
            cold_start_s=self._cold_starts.of("prefill"),
            start=start_phases(workers),
            wake_s=wake_s(workers),
            classes=by_class("prefill", seen),
        )

    def _decode(
        self,
        seen: dict[str, Sighting],
        models: Sequence[scaling_pb2.ModelSignals],
        totals: Totals | None,
        actual: Sequence[ActualReplica],
        now: float,
        wall: float,
    ) -> DecodeSignals:
        workers = serving("decode", seen)
        return DecodeSignals(
            replicas=replicas("decode", seen, actual, now, wall),
            running_requests=sum(worker.load.running_requests for worker in workers),
            # The coordinators count those that wait on the workers as well.
            waiting_reservations=max(
                sum(model.in_progress.reserving_requests for model in models),
                sum(worker.load.waiting_reservations for worker in workers),
            ),
            context_tokens=context_tokens(workers),
            kv_capacity_tokens=kv_capacity_tokens(workers),
            max_running_requests=max_running_requests(workers),
            step=step_fit(workers),
            tpot=_phase(totals, scaling_pb2.PHASE_TPOT),
            reserve_wait=_phase(totals, scaling_pb2.PHASE_RESERVE),
            cold_start_s=self._cold_starts.of("decode"),
            start=start_phases(workers),
            wake_s=wake_s(workers),
            classes=by_class("decode", seen),
        )


def _in_progress(now: scaling_pb2.InProgress) -> int:
    stages = now.admitting_requests, now.reserving_requests, now.prefilling_requests, now.decoding_requests
    return sum(stages)


def _names(actual: Sequence[ActualReplica]) -> list[str]:
    return [replica.name for replica in actual]


def _boots(answers: Iterable[tuple[str, scaling_pb2.GetSignalsResponse, float]]) -> list[tuple[str, int]]:
    models = [model for _, response, _ in answers for model in response.models]
    return [(worker.worker_id, worker.epoch) for model in models for worker in model.workers]


def _link(seen: dict[str, Sighting], totals: Totals | None) -> LinkSignals:
    return LinkSignals(
        gb_per_s=lane_gb_per_s(of_pool("prefill", seen)),
        kv_bytes_per_token=kv_bytes_per_token([worker.signals for worker in seen.values()]),
        transfer=_phase(totals, scaling_pb2.PHASE_TRANSFER),
    )


def _metrics(
    seen: dict[str, Sighting], models: Sequence[scaling_pb2.ModelSignals]
) -> dict[str, float | None]:
    """Further metrics for `target` policies, by name; see docs/metrics.md."""
    loads = [worker.load for worker in of_pool("decode", seen)]
    total_blocks = sum(load.total_blocks for load in loads)
    free_blocks = sum(load.free_blocks for load in loads)
    progress = [model.in_progress for model in models]
    return {
        "admitting_requests": float(sum(p.admitting_requests for p in progress)),
        "reserving_requests": float(sum(p.reserving_requests for p in progress)),
        "prefilling_requests": float(sum(p.prefilling_requests for p in progress)),
        "decoding_requests": float(sum(p.decoding_requests for p in progress)),
        "decode_running_requests": float(sum(load.running_requests for load in loads)) if loads else None,
        "decode_kv_usage": 1 - free_blocks / total_blocks if total_blocks else None,
    }


def _phase(totals: Totals | None, phase: int) -> Histogram | None:
    return None if totals is None else totals.phases[phase]


def _sum(parts: Iterable[Totals | None]) -> Totals | None:
    known = [part for part in parts if part is not None]
    if not known:
        return None
    total = known[0]
    for part in known[1:]:
        total += part
    return total
