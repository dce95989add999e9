"""Between which workers KV went lately: sums over the handoffs of requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from coordinator.records.request_record import RequestRecord
from coordinator.request.state import AttemptRecord, RequestState


@dataclass(frozen=True, slots=True)
class KvFlow:
    """What a prefill worker wrote to a decode worker within a window of time."""

    prefill_worker: str
    decode_worker: str
    handoffs: int
    written_bytes: int


def kv_flows(
    running: Iterable[RequestState],
    ended: Iterable[RequestRecord],
    window_s: float,
    now_s: float,
    now_unix_s: float,
) -> list[KvFlow]:
    """The flows of the last `window_s` seconds, the largest first. A handoff counts from when its prompt was computed.

    `ended` comes in reverse order of the ends. `now_s` is on the coordinator's monotonic clock, as `running` is.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for prefill, decode, written in (
        *_of_running(running, now_s - window_s),
        *_of_ended(ended, now_unix_s - window_s),
    ):
        handoffs, before = found.get((prefill, decode), (0, 0))
        found[prefill, decode] = handoffs + 1, before + written
    flows = [KvFlow(*pair, *sums) for pair, sums in found.items()]
    return sorted(flows, key=lambda flow: (-flow.written_bytes, flow.prefill_worker, flow.decode_worker))


def _of_running(states: Iterable[RequestState], since_s: float) -> Iterator[tuple[str, str, int]]:
    for state in states:
        for attempt in _attempts(state):
            written = attempt.report.transfer_bytes
            if (
                attempt.decode is not None
                and written
                and attempt.prefilled_s
                and attempt.prefilled_s >= since_s
            ):
                yield attempt.prefill.worker_id, attempt.decode.worker_id, written


def _attempts(state: RequestState) -> Iterator[AttemptRecord]:
    yield from state.past
    if state.current is not None and state.current.ended_s is None:
        yield state.current


def _of_ended(records: Iterable[RequestRecord], since_unix_s: float) -> Iterator[tuple[str, str, int]]:
    for record in records:
        if record.received_unix_s + record.ended_ms / 1e3 < since_unix_s:
            return
        for attempt in record.attempts:
            written, computed_ms = attempt.report.transfer_bytes, attempt.prefilled_ms
            if (
                written
                and computed_ms is not None
                and record.received_unix_s + computed_ms / 1e3 >= since_unix_s
            ):
                yield attempt.prefill_worker, attempt.decode_worker, written
