"""The lines of a record: within the width, bars in place, everything that matters said."""

from __future__ import annotations

import pytest

from launcher.cli.client.explain import document
from launcher.cli.client.waterfall import NAME, NUMBER, WORKER, record_lines, summary_lines
from splitserve.v1 import records_pb2

PHASES = [
    ("tokenize", 0.0, 1.0, ""),
    ("reserve", 1.0, 5.0, "decode-worker-with-a-long-name-0"),
    ("prefill_compute", 5.0, 40.0, "prefill-0"),
    ("transfer", 40.0, 42.0, "prefill-0"),
    ("decode", 44.0, 440.0, "decode-0"),
]


def record(**changed: object) -> records_pb2.RequestRecord:
    made = records_pb2.RequestRecord(
        request_id="r",
        tenant="default",
        model="m",
        outcome="completed",
        ttft_ms=40.0,
        total_ms=440.0,
        attempt_count=1,
        attempts=[
            records_pb2.RecordedAttempt(
                number=1, prefill_worker="prefill-0", decode_worker="decode-0", chunks=3,
                written_bytes=1_200_000, descriptors=4, transport="nixl", lane="local",
            )
        ],
        decisions=[
            records_pb2.RequestDecision(
                stage="decode", chosen="decode-0", attempt=1,
                reason="predicted 63.0 ms; " + "; ".join(f"decode-{n}: +{n}.0 ms decode" for n in (1, 2, 3)),
            )
        ],
        longest_gap_ms=9.0,
        longest_gap_position=7,
    )  # fmt: skip
    for name, start_ms, end_ms, worker in PHASES:
        made.phases.add(name=name, start_ms=start_ms, end_ms=end_ms, worker=worker)
    made.received.FromSeconds(1_700_000_000)
    made.MergeFrom(records_pb2.RequestRecord(**changed))
    return made


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_the_width(width: int) -> None:
    lines = record_lines(record(failure="UNAVAILABLE: " + "word " * 60), width)
    assert all(len(line.text) <= width for line in lines)
    assert all(line.text.isascii() for line in lines)


def test_bars_lie_where_their_phases_do() -> None:
    lines = {line.text.split(" ")[0]: line.text for line in record_lines(record(), 80)}
    begin = NAME + 2 * NUMBER + WORKER + 4
    room = 80 - begin
    bars = {name: lines[name][begin:] for name, *_ in PHASES}
    assert bars["tokenize"].startswith("#")
    assert bars["prefill_compute"].rstrip().count("#") == pytest.approx(35 / 40 * room, abs=1)
    assert len(bars["prefill_compute"].rstrip()) <= room
    assert bars["transfer"].startswith("#"), "after the first token another scale begins"
    assert " ..-long-name-0 " in lines["reserve"]


def test_attempts_decisions_and_gaps_are_told() -> None:
    text = "\n".join(line.text for line in record_lines(record(), 80))
    for part in (
        "3 prefill steps",
        "wrote 1.2 MB in 4",
        "over nixl (lane local)",
        "decode: decode-0",
        "decode-3: +3.0 ms decode",
        "longest gap 9.0 ms, before token 7",
    ):
        assert part in text


def test_without_a_first_token_there_is_one_scale() -> None:
    made = record(failure="WORKER_LOST: gone")
    made.ClearField("ttft_ms")
    text = "\n".join(line.text for line in record_lines(made, 80))
    assert "no first token" in text
    assert "WORKER_LOST: gone" in text
    assert "\nfirst token" not in text


def test_the_list_gives_whole_ids_and_reasons() -> None:
    name = "x" * 128
    made = records_pb2.RequestSummary(request_id=name, outcome="failed", kept_because=["failed: GONE: gone"])
    text = "\n".join(line.text for line in summary_lines([made], 80))
    assert name in text
    assert "    failed: GONE: gone" in text
    assert summary_lines([], 80)[0].text == "no such records are kept"


def test_a_prompt_that_the_decode_worker_computed_names_it_alone() -> None:
    made = record()
    made.attempts[0].prefill_worker = ""
    text = " ".join(line.text for line in record_lines(made, 120))
    assert "attempt 1: decode-0 alone" in text
    assert "->" not in text


def test_the_document_has_all_fields_as_plain_values() -> None:
    shown = document(record())
    assert shown["ttft_ms"] == 40.0
    assert shown["received"] == "2023-11-14T22:13:20Z"
    assert shown["attempts"][0]["written_bytes"] == 1_200_000
    assert shown["phases"][0].keys() == {"name", "start_ms", "end_ms", "worker", "attempt"}
    assert document(records_pb2.RequestRecord())["ttft_ms"] is None


@pytest.mark.parametrize("exported", [True, False])
def test_the_trace_is_named(exported: bool) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    lines = record_lines(record(trace_id=trace_id, trace_exported=exported), 120)
    text = " ".join(line.text for line in lines)
    assert f"trace {trace_id}" in text
    assert ("(not exported)" in text) is not exported
    assert "trace" not in " ".join(line.text for line in record_lines(record(), 120))
