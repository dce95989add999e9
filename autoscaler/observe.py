"""The senses of the autoscaler: asks all coordinators, remembers a window, and makes a `Snapshot`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from autoscaler import sightings
from autoscaler.actuator import ActualReplica
from autoscaler.arrival_log import ArrivalLog
from autoscaler.cold_starts import ColdStarts
from autoscaler.histogram import LATENCY_BOUNDS_S, Histogram
from autoscaler.sightings import Sighting
from autoscaler.snapshot import DecodeSignals, LinkSignals, PrefillSignals, Snapshot
from autoscaler.totals import CoordinatorTrack, Totals, totals_of
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.logs import log_event
from splitserve.v1 import scaling_pb2

DEFAULT_WINDOW_S = 60.0
DEFAULT_HISTORY_S = 900.0

Replicas = Callable[[], Awaitable[Sequence[ActualReplica]]]


class SignalSource(Protocol):
    """One coordinator; `splitserve.scaling_client.ScalingClient` is one."""

    target: str

    async def signals(self, model: str = "") -> scaling_pb2.GetSignalsResponse:
        """Its signals. Raises SplitserveError."""


async def _no_replicas() -> Sequence[ActualReplica]:
    return ()


class Observer:
    """Asks at each `observe`; between two calls nothing runs. Memory is bounded by `history_s` over their distance.

    `sources` stay their owner's. `replicas` lists what the actuator knows; workers that no actuator made are seen
    all the same. Histograms cover `window_s`, arrivals up to `history_s`. An empty `model` sums all models.

    A coordinator that does not answer keeps its last figures, and its mean demand, for `window_s`; after that they
    are missing. In both cases the snapshot is not `complete`.
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
    ) -> None:
        self._sources = tuple(sources)
        self._replicas = replicas
        self._model = model
        self._window_s = window_s
        self._clock, self._wall_clock = clock, wall_clock
        self._tracks = {source.target: CoordinatorTrack(window_s) for source in self._sources}
        self._log = ArrivalLog(max(history_s, window_s))
        self._cold_starts = ColdStarts()

    async def observe(self) -> Snapshot:
        """Looks once. Raises UnavailableError (NO_COORDINATOR) when none answers, and what `replicas` raises."""
        answers = await asyncio.gather(*(self._ask(source) for source in self._sources))
        actual = await self._replicas()
        answered = [answer for answer in answers if answer is not None]
        if not answered:
            named = ", ".join(source.target for source in self._sources)
            raise UnavailableError(f"no coordinator answers: {named}", reason="NO_COORDINATOR")
        now, wall = self._clock(), self._wall_clock()
        self._log.look(now)
        for target, response, at_s in answered:
            increment = self._tracks[target].take(response, totals_of(self._models(response)), at_s)
            if increment is not None:
                self._log.add(increment.start_s, increment.end_s, increment.totals.demand)
        return self._snapshot(actual, now, wall, complete=len(answered) == len(self._sources))

    async def _ask(self, source: SignalSource) -> tuple[str, scaling_pb2.GetSignalsResponse, float] | None:
        try:
            response = await source.signals(self._model)
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
        seen = sightings.merged(models)
        since = {name: (worker.state, wall - (now - worker.since_s)) for name, worker in seen.items()}
        self._cold_starts.look(actual, since)
        totals = _sum(track.window(now) for track in held)
        here = [model for answer, _ in models for model in answer]
        return Snapshot(
            now_s=now,
            prefill=self._prefill(seen, here, totals, actual, now, wall),
            decode=self._decode(seen, totals, actual, now, wall),
            link=_link(seen, totals),
            arrivals=self._log.buckets([(t.last_s, t.demand_per_s(now)) for t in held if t.last_s]),
            window_s=self._window_s,
            wall_s=wall,
            complete=complete,
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
        workers = sightings.of_pool("prefill", seen)
        return PrefillSignals(
            replicas=sightings.replicas("prefill", seen, actual, now, wall),
            waiting_requests=sum(model.in_progress.prefilling_requests for model in models),
            backlog_tokens=round(sum(model.in_progress.prefilling_tokens for model in models)),
            tokens_per_s=sightings.prefill_tokens_per_s(workers),
            latency=_phase(totals, scaling_pb2.PHASE_PREFILL),
            ttft=_phase(totals, scaling_pb2.PHASE_TTFT),
            cold_start_s=self._cold_starts.of("prefill"),
        )

    def _decode(
        self,
        seen: dict[str, Sighting],
        totals: Totals | None,
        actual: Sequence[ActualReplica],
        now: float,
        wall: float,
    ) -> DecodeSignals:
        workers = sightings.of_pool("decode", seen)
        return DecodeSignals(
            replicas=sightings.replicas("decode", seen, actual, now, wall),
            running_requests=sum(worker.load.running_requests for worker in workers),
            waiting_reservations=sum(worker.load.waiting_reservations for worker in workers),
            context_tokens=sightings.context_tokens(workers),
            kv_capacity_tokens=sightings.kv_capacity_tokens(workers),
            max_running_requests=sightings.max_running_requests(workers),
            step=sightings.step_fit(workers),
            tpot=_phase(totals, scaling_pb2.PHASE_TPOT),
            reserve_wait=_phase(totals, scaling_pb2.PHASE_RESERVE),
            cold_start_s=self._cold_starts.of("decode"),
        )


def _link(seen: dict[str, Sighting], totals: Totals | None) -> LinkSignals:
    return LinkSignals(
        gb_per_s=sightings.lane_gb_per_s(sightings.of_pool("prefill", seen)),
        kv_bytes_per_token=sightings.kv_bytes_per_token([worker.signals for worker in seen.values()]),
        transfer=_phase(totals, scaling_pb2.PHASE_TRANSFER),
    )


def _metrics(
    seen: dict[str, Sighting], models: Sequence[scaling_pb2.ModelSignals]
) -> dict[str, float | None]:
    """Further figures for `target` policies; docs/metrics.md tells what each means."""
    loads = [worker.load for worker in sightings.of_pool("decode", seen)]
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
