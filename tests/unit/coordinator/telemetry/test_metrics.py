"""The Prometheus endpoint: off by default, few fixed labels, typed when its port is taken."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from coordinator.telemetry.prometheus import coordinator_metrics
from coordinator.telemetry.request_stats import RequestStats
from coordinator.workers.snapshot import PoolSnapshot
from engine.core.engine import EngineLoad
from kv_transfer.lanes import JudgedLane, Lane
from splitserve import metrics
from splitserve.errors import FailedPreconditionError
from splitserve.v1 import scaling_pb2
from tests.support.waiting import PATIENCE_S
from worker.connector import WorkerStatus
from worker.metrics import worker_metrics

LOAD = EngineLoad(
    total_blocks=10, free_blocks=4, reserved_blocks=3, quarantined_blocks=2, referenced_blocks=1
)


def lanes(*speeds: float) -> tuple[JudgedLane, ...]:
    made = (Lane(f"agent-{n}", "local", speed, 0.0, 1, True) for n, speed in enumerate(speeds))
    return tuple(JudgedLane(lane, "slow" if lane.gb_per_s < 1 else None, False) for lane in made)


def scrape(monkeypatch: pytest.MonkeyPatch, read: metrics.Read) -> str:
    ready: list[int] = []
    monkeypatch.setattr(metrics, "log_event", lambda event, **fields: ready.append(fields["port"]))
    with (
        metrics.serving_metrics(read, "127.0.0.1", 0),
        urllib.request.urlopen(f"http://127.0.0.1:{ready[0]}/metrics", timeout=PATIENCE_S) as answer,
    ):
        return str(answer.read().decode())


def test_a_worker_s_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    status = WorkerStatus(
        load=LOAD,
        lanes=lanes(4, 0.5, 2, 8),
        handoffs_completed=7,
        handoff_bytes=900,
        handoffs_rejected={"wrong_bytes": 3},
    )
    text = scrape(monkeypatch, lambda: worker_metrics(status))
    for line in (
        'splitserve_kv_blocks{state="quarantined"} 2.0',
        'splitserve_kv_lane_gigabytes_per_second{stat="min"} 0.5',
        'splitserve_kv_lane_gigabytes_per_second{stat="median"} 3.0',
        "splitserve_kv_slow_lanes 1.0",
        "splitserve_handoffs_completed_total 7.0",
        'splitserve_handoffs_rejected_total{reason="wrong_bytes"} 3.0',
        "splitserve_kv_sent_bytes_total 900.0",
    ):
        assert line in text.splitlines()
    assert "agent-" not in text, "a label for each peer would make prefill times decode series"


def test_the_number_of_series_does_not_grow_with_the_peers() -> None:
    def series(count: int) -> int:
        read = worker_metrics(WorkerStatus(load=LOAD, lanes=lanes(*[1.0] * count)))
        return sum(len(metric.samples) for metric in read)

    assert series(1) == series(200)


def test_long_prompts_are_apart_and_both_sum_up() -> None:
    stats = RequestStats(long_prompt_tokens=100).of("m")
    stats.phases[scaling_pb2.PHASE_TTFT].add(1.0, cold=False)
    stats.phases[scaling_pb2.PHASE_TTFT].add(3.0, cold=False)
    stats.phases[scaling_pb2.PHASE_TTFT_LONG].add(3.0, cold=False)
    stats.short_ttft.add(1.0, cold=False)
    (ttft,) = (
        metric
        for metric in coordinator_metrics(PoolSnapshot(), 0, {"m": stats})
        if metric.name == "splitserve_time_to_first_token_seconds"
    )
    sums = {
        (sample.labels["cold"], sample.labels["prompt"]): sample.value
        for sample in ttft.samples
        if sample.name.endswith("_sum")
    }
    assert sums == {
        ("false", "long"): 3.0,
        ("false", "short"): 1.0,
        ("true", "long"): 0,
        ("true", "short"): 0,
    }


def test_without_a_port_there_is_no_endpoint() -> None:
    with metrics.serving_metrics(list, "not a host", None):
        pass


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(FailedPreconditionError, match="metrics_port") as refusal,
            metrics.serving_metrics(list, "127.0.0.1", port),
        ):
            pass
        assert refusal.value.field == "metrics_port"
