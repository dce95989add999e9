"""Learns what fetches take from requests' own calls and handoffs: a fetch is a handoff between the same workers."""

from __future__ import annotations

import time

from coordinator.peer_fetch.fetch_times import FetchTimes, beyond_idle_s
from coordinator.peer_fetch.prefix_offer import lane_seconds_of_bytes
from coordinator.request.observer import RequestObserver
from coordinator.request.state import RequestState
from splitserve.v1 import prefill_pb2


class HandoffWatch(RequestObserver):
    """Observes all requests. What a call has waited for at its worker is taken off."""

    def __init__(self, times: FetchTimes) -> None:
        self._times = times

    def reserve_ended(self, state: RequestState, waited_s: float) -> None:
        """See RequestObserver."""
        attempt = state.attempt
        report, decode = attempt.report, attempt.decode
        if decode is not None and report.reserve_ms:  # it was made
            call_s = report.reserve_ms / 1e3 - beyond_idle_s(report.reserve_wait_ms / 1e3)
            self._times.reserves.record(decode.key, call_s)

    def prefilled(self, state: RequestState, first: prefill_pb2.FirstToken) -> None:
        """See RequestObserver."""
        attempt = state.attempt
        if attempt.prefilling_s is not None and attempt.prefilled_s is not None:
            call_s = attempt.prefilled_s - attempt.prefilling_s - (first.queue_ms + first.compute_ms) / 1e3
            self._times.prefills.record(attempt.prefill.key, call_s)

    def transferred(self, state: RequestState, handoff: prefill_pb2.HandoffDone) -> None:
        """See RequestObserver."""
        attempt = state.attempt
        if attempt.decode is None or attempt.report.chunks != 1:  # of several chunks only the last is timed
            return
        lane_s = lane_seconds_of_bytes(attempt.prefill, attempt.decode, handoff.written_bytes)
        if lane_s is not None and handoff.written_bytes:
            pair = attempt.prefill.key, attempt.decode.key
            self._times.record_handoff(pair, lane_s, handoff.transfer_ms / 1e3, time.monotonic())
