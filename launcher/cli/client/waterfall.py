"""A request's record as lines for people: a waterfall of its phases, the decisions, the cost. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from splitserve.v1 import records_pb2

NAME, NUMBER, WORKER = 15, 9, 14
"""Widths of the columns; the bars get the rest."""
STYLES = {
    "admission": "yellow",
    "reserve": "yellow",
    "prefill_queue": "yellow",
    "prefill_compute": "green",
    "prefill": "red",
    "transfer": "cyan",
    "decode": "green",
}
"""Style of each phase: waiting is yellow, computing green, writing cyan, and a prefill that failed red."""
UNITS = ("B", "kB", "MB", "GB")


class Line(NamedTuple):
    """A line of text, and its style on a terminal; empty: plain."""

    text: str
    style: str = ""


def record_lines(record: records_pb2.RequestRecord, width: int) -> list[Line]:
    """The whole record. Lines have at most `width` characters, except where a word, like an id, is longer."""
    return [
        *_head(record, width),
        *_waterfall(record, width),
        Line(""),
        *_attempts(record, width),
        Line(""),
        Line("decisions", "bold"),
        *(line for decision in record.decisions for line in _decision(decision, record, width)),
        Line(""),
        *_foot(record, width),
    ]


def summary_lines(summaries: Sequence[records_pb2.RequestSummary], width: int) -> list[Line]:
    """A line for each kept record, and below it the reasons for keeping it."""
    if not summaries:
        return [Line("no such records are kept")]
    lines = [Line(f"{'request':32}  {'received (UTC)':14}  {'TTFT ms':>8}  outcome", "bold")]
    for summary in summaries:
        ttft = f"{summary.ttft_ms:.1f}" if summary.HasField("ttft_ms") else "none"
        clock = summary.received.ToDatetime().strftime("%m-%d %H:%M:%S")
        lines.append(Line(f"{summary.request_id:32}  {clock:14}  {ttft:>8}  {summary.outcome}"))
        for why in summary.kept_because:
            lines += _wrapped(why, width, "    ")
    return lines


def _head(record: records_pb2.RequestRecord, width: int) -> list[Line]:
    ttft = f"TTFT {record.ttft_ms:.1f} ms" if record.HasField("ttft_ms") else "no first token"
    served = record.served_model
    model = f"{record.model} (served by {served})" if served not in ("", record.model) else record.model
    facts = (
        f"{record.outcome}, {ttft}, {record.total_ms:.1f} ms in all; model {model or 'not named'}, "
        f"tenant {record.tenant}, {record.prompt_tokens} prompt and {record.output_tokens} output tokens, "
        f"received {record.received.ToJsonString()}"
    )
    if record.trace_id:
        facts += f", trace {record.trace_id}{'' if record.trace_exported else ' (not exported)'}"
    failure = _wrapped(record.failure, width, "", "red") if record.failure else []
    return [Line(f"request {record.request_id}", "bold"), *_wrapped(facts, width, ""), *failure, Line("")]


def _waterfall(record: records_pb2.RequestRecord, width: int) -> list[Line]:
    """Two scales: phases until the first token, which may be short, and those after it, which may be long."""
    heading = f"{'phase':{NAME}} {'start ms':>{NUMBER}} {'ms':>{NUMBER}} {'worker':{WORKER}}"
    lines = [Line(heading.rstrip(), "bold")]
    first_ms = record.ttft_ms if record.HasField("ttft_ms") else record.total_ms
    before = [phase for phase in record.phases if phase.start_ms < first_ms]
    after = [phase for phase in record.phases if phase.start_ms >= first_ms]
    lines += [_bar(phase, 0.0, first_ms, width) for phase in before]
    if record.HasField("ttft_ms"):
        lines.append(Line(f"{'first token':{NAME}} {record.ttft_ms:{NUMBER}.1f}", "bold"))
    end_ms = max([record.total_ms, *(phase.end_ms for phase in after)])
    lines += [_bar(phase, first_ms, end_ms, width) for phase in after]
    return lines


def _bar(phase: records_pb2.RequestPhase, from_ms: float, to_ms: float, width: int) -> Line:
    columns = f"{phase.name:{NAME}} {phase.start_ms:{NUMBER}.1f} {phase.end_ms - phase.start_ms:{NUMBER}.1f}"
    room = width - NAME - 2 * NUMBER - WORKER - 4
    span = max(to_ms - from_ms, 1e-9)
    left = min(int((phase.start_ms - from_ms) / span * room), room - 1)
    length = max(1, min(round((phase.end_ms - phase.start_ms) / span * room), room - left))
    worker = phase.worker if len(phase.worker) <= WORKER else f"..{phase.worker[2 - WORKER :]}"
    return Line(f"{columns} {worker:{WORKER}} {' ' * left}{'#' * length}", STYLES.get(phase.name, ""))


def _attempts(record: records_pb2.RequestRecord, width: int) -> Iterable[Line]:
    for attempt in record.attempts:
        pair = f"{attempt.decode_worker} alone"
        if attempt.prefill_worker:
            pair = f"{attempt.prefill_worker} -> {attempt.decode_worker or 'no decode worker'}"
        facts = [
            f"attempt {attempt.number}: {pair}",
            f"{attempt.chunks} prefill steps" if attempt.chunks else "",
            f"{attempt.cached_tokens} and {attempt.decode_cached_tokens} prompt tokens cached",
            f"{attempt.reserved_blocks} blocks reserved" if attempt.reserved_blocks else "",
        ]
        if attempt.written_bytes:
            lane = f" (lane {attempt.lane})" if attempt.lane else ""
            size = f"{_size(attempt.written_bytes)} in {attempt.descriptors} descriptors"
            facts.append(f"wrote {size} over {attempt.transport}{lane}")
        if attempt.failure:
            facts.append(f"{attempt.failed_worker} failed: {attempt.failure}")
        yield from _wrapped(", ".join(filter(None, facts)), width, "")
    if len(record.attempts) < record.attempt_count:
        yield Line(f"{record.attempt_count} attempts in all")


def _decision(
    decision: records_pb2.RequestDecision, record: records_pb2.RequestRecord, width: int
) -> list[Line]:
    number = f" (attempt {decision.attempt})" if record.attempt_count > 1 and decision.attempt else ""
    lines = _wrapped(f"{decision.stage}{number}: {decision.chosen}", width, "  ")
    for part in decision.reason.split("; "):
        lines += _wrapped(part, width, "      ")
    return lines


def _foot(record: records_pb2.RequestRecord, width: int) -> list[Line]:
    cost = record.cost
    text = (
        f"cost: prefill {cost.prefill_seconds:.3f} s, decode {cost.decode_seconds:.3f} s, "
        f"{cost.kv_block_seconds:.1f} KV block-seconds, {_size(cost.written_bytes)} written"
    )
    lines = _wrapped(text, width, "")
    if record.longest_gap_ms:
        gap = f"longest gap {record.longest_gap_ms:.1f} ms, before token {record.longest_gap_position}"
        lines += _wrapped(f"{record.tpot_ms:.1f} ms an output token; {gap}", width, "")
    for why in record.kept_because:
        lines += _wrapped(f"kept because {why}", width, "")
    return lines


def _size(count: float) -> str:
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == UNITS[0] else f"{count:.1f} {unit}"


def _wrapped(text: str, width: int, indent: str, style: str = "") -> list[Line]:
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [Line(line, style) for line in lines]
