"""What a recording of `splitserve record` tells beside its trace: measured times, and the workers' own reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoscaler.simulation.outcome import Slo
from autoscaler.simulation.traces.columns import ColumnMap
from autoscaler.simulation.traces.line_checks import lines_of
from autoscaler.simulation.traces.trace import Trace, read_trace, trace_of
from splitserve.errors import InvalidArgumentError

MAX_REQUESTS = 200_000


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """One recorded request. Times in seconds; 0: not measured."""

    prompt_tokens: int
    output_tokens: int
    completed: bool
    ttft_s: float | None
    tpot_s: float
    wait_s: float
    queue_s: float
    compute_s: float
    chunks: int
    cached_tokens: int
    handoff_s: float

    def attains(self, slo: Slo) -> bool:
        """Whether it completed within both targets."""
        if not self.completed or self.ttft_s is None or self.ttft_s > slo.ttft_s:
            return False
        return self.output_tokens < 2 or self.tpot_s <= slo.tpot_s


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """A trace, and what was measured with it. Both are empty for a trace that is no recording."""

    trace: Trace
    requests: Sequence[MeasuredRequest] = ()
    workers: Sequence[Mapping[str, Any]] = ()
    """Reports of the workers, as `splitserve.cli.advisor.recording_file` writes them."""

    @property
    def unfinished(self) -> int:
        """Requests that did not complete; their answers count as far as they came."""
        return sum(not request.completed for request in self.requests)

    def attainment(self, slo: Slo) -> float:
        """Share of the recorded requests within both targets."""
        return sum(request.attains(slo) for request in self.requests) / max(1, len(self.requests))


def load_traffic(path: Path, columns: ColumnMap | None = None) -> RecordedTraffic:
    """A recording, or any trace that the simulator reads; with `columns` any log that has these.

    Raises InvalidArgumentError naming the first bad line or the bound.
    """
    return traffic_of(path, read_trace(path), columns)


def traffic_of(path: Path, text: str, columns: ColumnMap | None = None) -> RecordedTraffic:
    """The same of a file that has been read."""
    trace = trace_of(path, text, columns=columns)
    if len(trace.requests) > MAX_REQUESTS:
        message = f"trace: {len(trace.requests)} requests are more than {MAX_REQUESTS}: cut the file"
        raise InvalidArgumentError(message, reason="TRACE_TOO_LONG", field="trace")
    requests: list[MeasuredRequest] = []
    workers: list[Mapping[str, Any]] = []
    if columns is not None or not text.lstrip().startswith("{"):
        return RecordedTraffic(trace)
    for number, line in enumerate(lines_of(text), 1):
        data = json.loads(line) if line.strip() else {}
        try:
            if "workers" in data:
                workers += [dict(worker) for worker in data["workers"]]
            elif "outcome" in data:
                requests.append(_measured(data))
        except (KeyError, TypeError, ValueError) as error:
            message = f"trace: {path}, line {number}: not a line of a recording ({error!r})"
            raise InvalidArgumentError(message, reason="BAD_TRACE", field="trace") from None
    return RecordedTraffic(trace, requests, workers)


def _measured(data: Mapping[str, Any]) -> MeasuredRequest:
    ttft_ms = data["ttft_ms"]
    return MeasuredRequest(
        prompt_tokens=int(data["input_length"]),
        output_tokens=int(data["output_length"]),
        completed=data["outcome"] == "completed",
        ttft_s=None if ttft_ms is None else float(ttft_ms) / 1e3,
        tpot_s=float(data["tpot_ms"]) / 1e3,
        wait_s=float(data["wait_ms"]) / 1e3,
        queue_s=float(data["prefill_queue_ms"]) / 1e3,
        compute_s=float(data["prefill_compute_ms"]) / 1e3,
        chunks=int(data["prefill_chunks"]),
        cached_tokens=int(data["cached_tokens"]),
        handoff_s=float(data["handoff_ms"]) / 1e3,
    )
