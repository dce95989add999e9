"""Where the time of a request went: its record as a row of phases. Pure.

Until the first token, phases follow on each other without gap or overlap: their times add up to the TTFT exactly. What
workers measured themselves (queue, computing) is placed as early as it can have been; what is left of the time between
the prompt's leaving and the first token is `deliver`: the ways there and back, and sending. After the first token the
handoff and decoding overlap, and are placed by what is known of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.records.request_record import AttemptFacts, RequestRecord

LEAST_MS = 1e-6
"""Shorter phases are left out."""


@dataclass(frozen=True, slots=True)
class PhaseOfRequest:
    """A part of a request's time. Milliseconds since receipt."""

    name: str
    start_ms: float
    end_ms: float
    worker: str = ""
    """Empty: the coordinator itself."""
    attempt: int = 0
    """From 1; 0: before the first."""


def phases_of(record: RequestRecord) -> list[PhaseOfRequest]:
    """The phases of a request in order of their begin; see the module's text."""
    row = _Row(record.ended_ms)
    row.until("tokenize", record.tokenized_ms)
    row.until("admission", record.admitted_ms)
    first = record.first_attempt
    after: list[PhaseOfRequest] = []
    for attempt in record.attempts:
        delivered_ms = record.first_token_ms if attempt is first else attempt.prefilled_ms
        _add_attempt(row, attempt, delivered_ms)
        if delivered_ms is not None:
            after += _after_first_token(attempt, delivered_ms)
            row.at_ms = attempt.ended_ms
    row.until("end" if record.attempts else "route", record.ended_ms)
    found = [*row.phases, *after]
    return sorted(found, key=lambda phase: phase.start_ms)


class _Row:
    """Phases that follow on each other."""

    def __init__(self, ended_ms: float) -> None:
        self.phases: list[PhaseOfRequest] = []
        self.at_ms = 0.0
        self._ended_ms = ended_ms

    def until(self, name: str, end_ms: float | None, worker: str = "", attempt: int = 0) -> None:
        """The next phase, up to a moment; None: up to the end of the request. One without length is left out."""
        end_ms = self._ended_ms if end_ms is None else end_ms
        if end_ms - self.at_ms > LEAST_MS:
            self.phases.append(PhaseOfRequest(name, self.at_ms, end_ms, worker, attempt))
            self.at_ms = end_ms

    def lasting(self, name: str, took_ms: float, most_ms: float, worker: str, attempt: int) -> None:
        """The next phase, by its duration, but not beyond `most_ms`."""
        self.until(name, min(self.at_ms + took_ms, most_ms), worker, attempt)


def _add_attempt(row: _Row, attempt: AttemptFacts, delivered_ms: float | None) -> None:
    """The phases of an attempt up to its first token, or to its end without one."""
    report, number = attempt.report, attempt.number
    asked_ms = attempt.prefilling_ms
    if attempt.is_local:
        # The decode worker computes from the reservation on, which it answers when it has begun.
        asked_ms = attempt.reserving_ms
        row.until("route", asked_ms, attempt=number)
    elif asked_ms is not None:
        row.until("route", asked_ms - report.reserve_ms, attempt=number)
        row.until("reserve", asked_ms, attempt.decode_worker, number)
    elif attempt.reserving_ms is not None:
        row.until("route", attempt.reserving_ms, attempt=number)
        row.until("reserve", attempt.ended_ms, attempt.decode_worker, number)
    if asked_ms is None:
        row.until("route", attempt.ended_ms, attempt=number)
        return
    worker = attempt.decode_worker if attempt.is_local else attempt.prefill_worker
    if delivered_ms is None:
        row.until("prefill", attempt.ended_ms, worker, number)
        return
    row.lasting("prefill_queue", report.worker_queue_ms, delivered_ms, worker, number)
    row.lasting("prefill_compute", report.prefill_ms, delivered_ms, worker, number)
    row.until("deliver", delivered_ms, attempt=number)


def _after_first_token(attempt: AttemptFacts, delivered_ms: float) -> list[PhaseOfRequest]:
    """The handoff and decoding of an attempt. What may have begun before the first token is shown from it on."""
    report, number = attempt.report, attempt.number
    found = []
    if report.transfer_bytes:
        end_ms = delivered_ms + report.transfer_ms
        found.append(PhaseOfRequest("transfer", delivered_ms, end_ms, attempt.prefill_worker, number))
    began_ms = attempt.decoding_ms
    if began_ms is not None:
        began_ms = max(began_ms, delivered_ms)
        if not attempt.is_local:
            start_ms = max(delivered_ms, began_ms - report.decode_admit_ms)
            end_ms = start_ms + report.decode_admit_ms
            found.append(PhaseOfRequest("decode_admit", start_ms, end_ms, attempt.decode_worker, number))
        end_ms = max(began_ms, attempt.ended_ms)
        found.append(PhaseOfRequest("decode", began_ms, end_ms, attempt.decode_worker, number))
    return found
