"""Figures over time: a point holds what was counted since the one before, and the points add up to the counters."""

from __future__ import annotations

import pytest

from coordinator.admission.controller import AdmissionCounts
from coordinator.entrypoints.page.figure_series import COLUMNS, MAX_MODELS, MAX_POINTS, FigureSeries
from coordinator.telemetry.request_stats import ModelStats
from coordinator.workers.registration import checked_worker
from coordinator.workers.snapshot import PoolSnapshot
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.cluster.registrations import registration

EMPTY = PoolSnapshot()
TTFT, TPOT, RESERVE = scaling_pb2.PHASE_TTFT, scaling_pb2.PHASE_TPOT, scaling_pb2.PHASE_RESERVE


def points(series: FigureSeries, model: str) -> list[dict[str, float | None]]:
    document = series.document()
    return [dict(zip(document["columns"], row, strict=True)) for row in document["models"][model]]


def test_points_hold_the_growth_and_add_up() -> None:
    series, stats = FigureSeries(), {"words": ModelStats()}
    series.sample(stats, {}, EMPTY, 100.0)
    words = stats["words"]
    for cold, seconds in ((True, 0.2), (False, 0.1)):
        words.arrived(10, 10.0, 5.0)
        words.phases[TTFT].add(seconds, cold=cold)
        words.phases[RESERVE].add(seconds / 4, cold=cold)
    words.phases[TPOT].add(0.02, cold=False)
    words.outcomes[scaling_pb2.OUTCOME_FAILED] += 1
    series.sample(stats, {}, EMPTY, 102.0)
    words.phases[TTFT].add(0.3, cold=False)
    series.sample(stats, {}, EMPTY, 104.0)
    first, second, third = points(series, "words")
    assert (first["at"], first["requests"], first["ttft_p50_ms"]) == (100.0, 0, None)
    assert (second["requests"], second["failed"], second["ttft_count"], second["tpot_count"]) == (2, 1, 2, 1)
    assert second["reserve_ms"] == pytest.approx(75.0)
    assert third["requests"] == 0
    both = second["ttft_ms"] or 0.0, third["ttft_ms"] or 0.0
    assert sum(both) == pytest.approx(
        words.phases[TTFT].warm.sum_s * 1e3 + words.phases[TTFT].cold.sum_s * 1e3
    )
    assert third["ttft_p50_ms"] == pytest.approx(300.0, rel=0.15)


def test_queue_and_kv_are_those_of_the_moment() -> None:
    series, queue = FigureSeries(), AdmissionCounts()
    queue.queued["interactive"], queue.queued["batch"] = 2, 3
    decode = checked_worker(registration("d0", registry_pb2.ROLE_DECODE))
    decode.load.total_blocks, decode.load.free_blocks = 100, 25
    model = decode.model.name
    series.sample({model: ModelStats()}, {model: queue}, PoolSnapshot((decode,)), 100.0)
    (row,) = points(series, model)
    assert (row["queued"], row["decode_kv"], row["prefill_kv"]) == (5, 0.75, None)
    assert series.latest()[model] == tuple(row.values())


def test_points_and_models_are_bounded() -> None:
    series = FigureSeries()
    stats = {f"m{number:02}": ModelStats(requests=number) for number in range(MAX_MODELS + 4)}
    for moment in range(MAX_POINTS + 10):
        series.sample(stats, {}, EMPTY, float(moment))
    shown = series.document()["models"]
    assert list(shown) == [f"m{number:02}" for number in range(4, MAX_MODELS + 4)]
    assert {len(rows) for rows in shown.values()} == {MAX_POINTS}
    assert all(len(row) == len(COLUMNS) for rows in shown.values() for row in rows)
    stats = {"m00": ModelStats()}
    series.sample(stats, {}, EMPTY, 9999.0)
    assert list(series.document()["models"]) == ["m00"]
