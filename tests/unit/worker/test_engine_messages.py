"""Load reports of a worker, and the targets of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.engine import EngineLoad, EngineRequest, PoolingParams
from engine.core.model_runner import ModelFacts
from splitserve.errors import InvalidArgumentError
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2
from worker.messages import engine_request, worker_load

STOP = generation_pb2.StopParams(max_tokens=1)


def test_a_report_has_the_latency_model_in_milliseconds() -> None:
    model = LatencyModel(PrefillLatency(0.25, 0.5, 0.125), DecodeLatency(0.5, 0.25))
    latency = worker_load(EngineLoad(latency=model)).latency
    assert (latency.prefill.base_ms, latency.prefill.token_ms, latency.prefill.pair_ms) == (250, 500, 125)
    assert (latency.decode.base_ms, latency.decode.sequence_ms) == (500, 250)


def test_a_worker_that_has_measured_nothing_reports_no_part_of_it() -> None:
    latency = worker_load(EngineLoad()).latency
    assert not latency.HasField("prefill")
    assert not latency.HasField("decode")


def asked(message: decode_pb2.ReserveRequest | prefill_pb2.PrefillRequest) -> EngineRequest:
    message.timeout.FromSeconds(1)
    facts = ModelFacts(64, 257, frozenset({256}))
    return engine_request(message, engine_id="e", facts=facts, now=100.0, prefill_only=False)


def targeted(**fields: float) -> EngineRequest:
    targets = generation_pb2.ServiceTargets(**fields)
    return asked(decode_pb2.ReserveRequest(request_id="r", token_ids=[1], stop=STOP, targets=targets))


def test_targets_become_times_of_the_engine_s_clock() -> None:
    whole = targeted(tpot_ms=50, ttft_ms=1000, ttft_left_ms=-250)
    assert (whole.tpot_s, whole.first_due_s) == (0.05, 99.75)
    paced = targeted(tpot_ms=50, ttft_left_ms=5)
    assert (paced.tpot_s, paced.first_due_s) == (0.05, float("inf"))


def test_a_request_without_targets_has_none() -> None:
    for message in (decode_pb2.ReserveRequest, prefill_pb2.PrefillRequest):
        request = asked(message(request_id="r", token_ids=[1], stop=STOP))
        assert (request.tpot_s, request.first_due_s) == (None, float("inf"))


def test_prefill_has_them_too() -> None:
    targets = generation_pb2.ServiceTargets(ttft_ms=1000, ttft_left_ms=500)
    message = prefill_pb2.PrefillRequest(request_id="r", token_ids=[1], stop=STOP, targets=targets)
    assert (asked(message).tpot_s, asked(message).first_due_s) == (None, 100.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tpot_ms", -1.0),
        ("tpot_ms", 5e-324),
        ("ttft_ms", 1e-320),
        ("tpot_ms", 3.7e6),
        ("tpot_ms", float("nan")),
        ("ttft_ms", 1e9),
        ("ttft_left_ms", float("-inf")),
    ],
)
def test_targets_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        targeted(**{name: value})
    assert caught.value.field == f"targets.{name}"


@pytest.mark.parametrize("pools", [False, True])
def test_what_a_model_does_not_do_is_refused(pools: bool) -> None:
    facts = ModelFacts(
        64,
        257,
        frozenset(),
        pooling=generation_pb2.POOLING_EMBED if pools else generation_pb2.POOLING_UNSPECIFIED,
    )
    how = generation_pb2.PoolingParams(dimensions=8, use_activation=False)
    asked = prefill_pb2.PrefillRequest(request_id="r", token_ids=[1, 2, 3], stop=STOP)
    pooled = prefill_pb2.PrefillRequest(pooling=how, second_begins=2)
    pooled.MergeFrom(asked)
    for message in (asked, pooled):
        message.timeout.FromSeconds(1)
    fits, differs = (pooled, asked) if pools else (asked, pooled)
    options: Any = {"engine_id": "e", "facts": facts, "now": 0.0, "prefill_only": True}
    with pytest.raises(InvalidArgumentError, match="pooling"):
        engine_request(differs, **options)
    params = engine_request(fits, **options).pooling
    assert params == (PoolingParams(8, use_activation=False, second_begins=2) if pools else None)
    pooled.second_begins = 4
    with pytest.raises(InvalidArgumentError):
        engine_request(pooled, **options)
