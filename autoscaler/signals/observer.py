"""Makes a `Snapshot` from the counters of all coordinators and their increase over a window."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.signals.arrival_log import ArrivalLog
from autoscaler.signals.cold_starts import ColdStarts, start_phases
from autoscaler.signals.totals import CoordinatorTrack, totals_of
from autoscaler.signals.worker_view import (
    Sighting,
    context_tokens,
    decode_latency,
    joined,
    lane_gb_per_s,
    mean_reported,
    merged,
    of_pool,
    prefill_tokens_per_s,
    with_served,
)
from autoscaler.snapshot import DecodeSignals, LinkSignals, PrefillSignals, Snapshot
from splitserve.client.scaling_client import ScalingClient
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.histograms import LATENCY_BOUNDS_S
from splitserve.logs import log_event
from splitserve.v1 import registry_pb2, scaling_pb2

DEFAULT_WINDOW_S = 60.0
DEFAULT_HISTORY_S = 900.0
MAX_FOREIGN = 10_000
"""Names of other models' workers that are remembered."""

Replicas = Callable[[], Awaitable[Sequence[ActualReplica]]]
OnEnded = Callable[[Sequence[tuple[str, int]]], Awaitable[None]]
"""Takes (worker id, epoch) pairs."""


class Observer:
    """Polls all coordinators at each `observe`; nothing runs in between. Memory is bounded by `keep_history`.

    The caller closes `sources`. `replicas` lists the actuator's replicas; snapshots include other workers as well.
    Without an actuator (None) all workers count as its replicas.
    `on_ended` is told of boots whose replicas are no longer listed; give it only when that proves that they have ended.
    Histograms cover `window_s` seconds, arrivals DEFAULT_HISTORY_S or the time given to `keep_history`. An empty
    `model` sums all models; with a model, snapshots leave the workers of all others out.

    The last figures and the mean demand of a coordinator that does not answer count for `window_s` seconds and are
    missing afterwards. In both cases the snapshot is not `complete`.
    """

    def __init__(
        self,
        sources: Sequence[ScalingClient],
        replicas: Replicas | None = None,
        *,
        model: str = "",
        window_s: float = DEFAULT_WINDOW_S,
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
        self._log = ArrivalLog(max(DEFAULT_HISTORY_S, window_s))
        self._cold_starts = ColdStarts()
        self._foreign: dict[str, None] = {}
        self.served: dict[str, registry_pb2.ServedModel] = {}
        """The models that coordinators have reported, as workers last served them."""

    def keep_history(self, history_s: float) -> None:
        """From now on keeps the arrivals of this many seconds."""
        self._log.history_s = max(history_s, self._window_s)

    async def observe(self) -> Snapshot:
        """Takes a snapshot. Raises UnavailableError (NO_COORDINATOR) when none answers, and what `replicas` raises."""
        answers = await asyncio.gather(*(self._ask(source) for source in self._sources))
        listed = None if self._replicas is None else await self._replicas()
        answered = [answer for answer in answers if answer is not None]
        if not answered:
            named = ", ".join(source.target for source in self._sources)
            raise UnavailableError(f"no coordinator answers: {named}", reason="NO_COORDINATOR")
        if self._on_ended is not None:
            names = [replica.name for replica in listed or ()]
            if ended := self._ended.look(names, _boots(answered)):
                await self._on_ended(ended)
        now, wall = self._clock(), self._wall_clock()
        self._log.look(now)
        for target, response, at_s in answered:
            arrived = self._tracks[target].take(response, totals_of(self._models(response)), at_s)
            if arrived is not None:
                since_s, demand = arrived
                self._log.add(since_s, at_s, demand)
        self._learn_foreign(answered)
        known = [model for _, answer, _ in answered for model in self._models(answer)]
        self.served = with_served(self.served, known)
        actual = listed and [replica for replica in listed if replica.name not in self._foreign]
        return self._snapshot(actual, now, wall, complete=len(answered) == len(self._sources))

    def _learn_foreign(self, answers: Sequence[tuple[str, scaling_pb2.GetSignalsResponse, float]]) -> None:
        """Remembers the workers of other models by name, also while they are not registered: no coordinator then knows
        their model. A name is forgotten when a worker of this model takes it; the oldest go beyond MAX_FOREIGN."""
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

    async def _ask(self, source: ScalingClient) -> tuple[str, scaling_pb2.GetSignalsResponse, float] | None:
        try:
            # For all models: the workers of other models must be known in order to be left alone.
            response = await source.signals()
        except SplitserveError as error:
            log_event("signals.missing", coordinator=source.target, reason=error.reason, error=error.message)
            return None
        if tuple(response.bounds_seconds) != LATENCY_BOUNDS_S:
            problem = "its histograms have other bounds: another version"
            log_event("signals.missing", coordinator=source.target, reason="VERSION_MISMATCH", error=problem)
            return None
        return source.target, response, self._clock()

    def _snapshot(
        self, actual: Sequence[ActualReplica] | None, now: float, wall: float, *, complete: bool
    ) -> Snapshot:
        held = [
            track
            for track in self._tracks.values()
            if track.last_s is not None and now - track.last_s <= self._window_s
        ]
        models = [(self._models(track.last), track.last_s) for track in held if track.last and track.last_s]
        seen = merged(models)
        replicas = joined(seen, actual, now, wall)
        if actual is not None:
            self._cold_starts.look(replicas, wall - now)
        windows = [window for track in held if (window := track.window(now)) is not None]
        phases = sum(windows[1:], windows[0]).phases if windows else {}
        progress = [model.in_progress for answered, _ in models for model in answered]
        prefills, decodes = of_pool("prefill", seen), of_pool("decode", seen)
        prefill = PrefillSignals(
            replicas=replicas["prefill"],
            waiting_requests=sum(model.prefilling_requests for model in progress),
            backlog_tokens=round(sum(model.prefilling_tokens for model in progress)),
            tokens_per_s=prefill_tokens_per_s(prefills),
            latency=phases.get(scaling_pb2.PHASE_PREFILL),
            ttft=phases.get(scaling_pb2.PHASE_TTFT),
            cold_start_s=self._cold_starts.of("prefill"),
            start=start_phases(prefills),
        )
        decode = DecodeSignals(
            replicas=replicas["decode"],
            running_requests=sum(worker.load.running_requests for worker in decodes),
            # Both count the same requests, but a coordinator also counts its own waiting ones.
            waiting_reservations=max(
                sum(model.reserving_requests for model in progress),
                sum(worker.load.waiting_reservations for worker in decodes),
            ),
            context_tokens=context_tokens(decodes),
            kv_capacity_tokens=mean_reported(worker.kv_capacity_tokens for worker in decodes),
            max_running_requests=mean_reported(worker.max_running_requests for worker in decodes),
            step=decode_latency(decodes),
            tpot=phases.get(scaling_pb2.PHASE_TPOT),
            cold_start_s=self._cold_starts.of("decode"),
            start=start_phases(decodes),
        )
        return Snapshot(
            now_s=now,
            prefill=prefill,
            decode=decode,
            link=LinkSignals(
                lane_gb_per_s(prefills),
                mean_reported(worker.signals.kv_bytes_per_token for worker in seen.values()),
            ),
            arrivals=self._log.buckets(
                [(track.last_s, track.demand_per_s()) for track in held if track.last_s]
            ),
            window_s=self._window_s,
            wall_s=wall,
            complete=complete,
            waiting_for_workers=sum(model.waiting_for_workers for model in progress),
            in_progress=sum(
                model.admitting_requests
                + model.reserving_requests
                + model.prefilling_requests
                + model.decoding_requests
                for model in progress
            ),
            model_known=bool(self.served),
            metrics=_metrics(seen, progress),
        )

    def _models(self, response: scaling_pb2.GetSignalsResponse) -> list[scaling_pb2.ModelSignals]:
        return [model for model in response.models if not self._model or model.model == self._model]


def _boots(answers: Iterable[tuple[str, scaling_pb2.GetSignalsResponse, float]]) -> list[tuple[str, int]]:
    models = [model for _, response, _ in answers for model in response.models]
    return [(worker.worker_id, worker.epoch) for model in models for worker in model.workers]


def _metrics(
    seen: dict[str, Sighting], progress: Sequence[scaling_pb2.InProgress]
) -> dict[str, float | None]:
    """Further metrics for `target` policies, by name; see docs/reference/metrics.md."""
    loads = [worker.load for worker in of_pool("decode", seen)]
    total_blocks = sum(load.total_blocks for load in loads)
    free_blocks = sum(load.free_blocks for load in loads)
    return {
        "admitting_requests": float(sum(p.admitting_requests for p in progress)),
        "reserving_requests": float(sum(p.reserving_requests for p in progress)),
        "prefilling_requests": float(sum(p.prefilling_requests for p in progress)),
        "decoding_requests": float(sum(p.decoding_requests for p in progress)),
        "decode_running_requests": float(sum(load.running_requests for load in loads)) if loads else None,
        "decode_kv_usage": 1 - free_blocks / total_blocks if total_blocks else None,
    }


MAX_ENDED = 256
"""Ended boots that are reported again at each look; coordinators keep as many."""


class EndedReplicas:
    """Finds ended boots, for an actuator whose list is complete: a replica that leaves the list has ended.

    Workers that were never on the list belong to somebody else and are never named. A replica that was started again
    under its name stays on the list; the coordinators find out themselves that its older boot has ended.
    """

    def __init__(self) -> None:
        self._boots: dict[str, set[int]] = {}
        """Epochs seen of each listed replica, by name."""
        self._ended: dict[tuple[str, int], None] = {}

    def look(self, listed: Iterable[str], boots: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        """The boots, (worker id, epoch), that have ended, the latest MAX_ENDED.

        `boots` are those that coordinators reported before the replicas were listed.
        """
        names = set(listed)
        for name in names - self._boots.keys():
            self._boots[name] = set()
        for name, epoch in boots:
            if name in self._boots:
                self._boots[name].add(epoch)
        for name in self._boots.keys() - names:
            self._ended |= dict.fromkeys((name, epoch) for epoch in sorted(self._boots.pop(name)))
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        return tuple(self._ended)
