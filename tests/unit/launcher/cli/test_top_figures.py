"""What `splitserve top` makes of two readings of the signals."""

from __future__ import annotations

from itertools import chain

import pytest

from launcher.cli.client.top_figures import LatencyTargets, Reading, figures
from splitserve.histograms import LATENCY_BOUNDS_S, Histogram
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.latency import latency as latency_of

TARGETS = LatencyTargets(ttft_s=0.2, tpot_s=0.1)


def counts(*values: int) -> list[int]:
    """So many latencies of 50, 150 and 300 ms."""
    times = [[time_s] * count for time_s, count in zip((0.05, 0.15, 0.3), values, strict=True)]
    return [int(count) for count in Histogram.of(chain(*times)).counts]


def signals(
    requests: int,
    ttft: tuple[int, ...] = (0, 0, 0),
    completed: int = 0,
    coordinator: str = "c0",
    bounds: tuple[float, ...] = LATENCY_BOUNDS_S,
    workers: tuple[str, ...] = (),
    long: tuple[int, ...] | None = None,
) -> scaling_pb2.GetSignalsResponse:
    load = registry_pb2.WorkerLoad(
        total_blocks=100,
        free_blocks=25,
        running_requests=3,
        waiting_tokens=70,
        latency=latency_of(step_ms=12.5),
    )
    model = scaling_pb2.ModelSignals(
        model="m",
        arrivals=scaling_pb2.Arrivals(requests=requests, prompt_tokens=100 * requests),
        phases=[
            scaling_pb2.PhaseHistogram(phase=scaling_pb2.PHASE_TTFT, counts=counts(*ttft)),
            *(
                [scaling_pb2.PhaseHistogram(phase=scaling_pb2.PHASE_TTFT_LONG, counts=counts(*long))]
                if long
                else []
            ),
        ],
        outcomes=[scaling_pb2.OutcomeCount(outcome=scaling_pb2.OUTCOME_COMPLETED, count=completed)],
        in_progress=scaling_pb2.InProgress(prefilling_requests=2, decoding_requests=5),
        workers=[
            scaling_pb2.WorkerSignals(
                worker_id=name, role=registry_pb2.ROLE_DECODE, state=scaling_pb2.WORKER_STATE_READY, load=load
            )
            for name in workers
        ],
        cached_share=0.5,
    )
    return scaling_pb2.GetSignalsResponse(coordinator_id=coordinator, bounds_seconds=bounds, models=[model])


def test_figures_are_those_of_the_time_between() -> None:
    before = Reading(10.0, [signals(100, (50, 50, 0), 90)])
    now = Reading(12.0, [signals(110, (52, 54, 4), 96, workers=("d1", "d0"))])
    (model,) = figures(before, now, TARGETS)
    assert (model.model, model.requests_per_s, model.prompt_tokens_per_s) == ("m", 5.0, 500.0)
    assert model.outcomes_per_s == {"completed": 3.0}
    assert model.in_progress == {"admitting": 0, "reserving": 0, "prefilling": 2, "decoding": 5}
    # Two of 50 ms, four of 150 ms and four of 300 ms.
    assert model.ttft.p50_ms == pytest.approx(150.0, rel=0.15)
    assert model.ttft.attained == pytest.approx(0.6)
    assert model.tpot.p50_ms is None
    assert [worker.worker_id for worker in model.workers] == ["d0", "d1"]
    worker = model.workers[0]
    assert (worker.role, worker.state, worker.kv_used, worker.step_ms) == ("decode", "ready", 0.75, 12.5)
    assert worker.prefill_tokens_per_s == 0.0


def test_long_prompts_are_apart() -> None:
    before = Reading(10.0, [signals(100, (50, 50, 0), long=(0, 9, 0))])
    now = Reading(12.0, [signals(110, (52, 54, 4), long=(0, 9, 4))])
    (model,) = figures(before, now, TARGETS)
    assert (model.ttft.attained, model.ttft_long.attained) == (0.6, 0.0)
    (model,) = figures(Reading(0.0, [signals(0)]), Reading(1.0, [signals(1, (1, 0, 0))]), TARGETS)
    assert (model.ttft.attained, model.ttft_long.attained) == (1.0, None)


def test_several_coordinators_add_up_and_share_their_workers() -> None:
    before = Reading(0.0, [signals(0), signals(0, coordinator="c1")])
    now = Reading(1.0, [signals(4, workers=("d0",)), signals(6, coordinator="c1", workers=("d0",))])
    (model,) = figures(before, now, TARGETS)
    assert model.requests_per_s == 10.0
    assert model.in_progress["decoding"] == 10
    assert len(model.workers) == 1
    assert model.cached_share == 0.5


def test_a_coordinator_that_is_new_counts_from_the_next_reading() -> None:
    (model,) = figures(Reading(0.0, [signals(5)]), Reading(1.0, [signals(9, coordinator="c9")]), TARGETS)
    assert model.requests_per_s == 0.0
    assert model.ttft.attained is None
    assert figures(Reading(0.0, []), Reading(1.0, []), TARGETS) == []


def test_coordinators_with_other_bounds_are_not_added() -> None:
    other = {"coordinator": "c1", "bounds": (1.0, 2.0, 3.0)}
    before = Reading(0.0, [signals(0), signals(0, **other)])  # type: ignore[arg-type]
    now = Reading(1.0, [signals(2, (2, 0, 0)), signals(2, (0, 0, 2), **other)])  # type: ignore[arg-type]
    assert figures(before, now, TARGETS)[0].ttft.attained == 1.0


def test_share_within_a_bound() -> None:
    bounds = (0.1, 0.2, 0.4)
    counted = Histogram.of([0.05, 0.15, 0.15, 0.5], bounds)
    assert counted.share_within(0.1) == 0.25
    assert counted.share_within(0.2) == 0.75
    assert counted.share_within(0.15) == pytest.approx(0.5)
    assert counted.share_within(9.0) == 0.75  # values above the last bound are of unknown size
    assert Histogram.of([], bounds).share_within(1.0) is None
