"""When the decode worker computes a prompt itself: the decision, from the workers' latency models alone."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.request.state import PairCost
from coordinator.routing.router import (
    MAX_TOKENS_WITHOUT_TARGET,
    Pair,
    local_prefill_tokens,
    local_tokens_of_pair,
)
from coordinator.workers.load import DecodeLoad, Flight, PrefillLoad, WorkerLoads
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency
from tests.support.clients.admission_parts import worker

PREFILL = PrefillLatency(base_s=0.01, token_s=0.001)
DECODE = DecodeLatency(base_s=0.01, sequence_s=0.001)
MODEL = LatencyModel(PREFILL, DECODE)
BESIDE: dict[str, Any] = {"streams": 5, "tpot_s": 0.065}
"""A step of 15 ms leaves 50 ms, in which 40 prompt tokens are computed."""


def decided(
    tokens: int = 100,
    cached: int = 0,
    split_s: float = 0.2,
    model: LatencyModel = MODEL,
    waiting: int = 0,
    streams: int = 0,
    context: int = 0,
    tpot_s: float | None = None,
    prefill_model: LatencyModel = MODEL,
) -> int:
    """For a prompt of which the decode worker lacks `tokens`, and whose first token comes by a handoff in `split_s`."""
    prefill, decode = PrefillLoad(("p", 1), 8, latency=prefill_model), DecodeLoad(("d", 1), 8, latency=model)
    decode.awaited_tokens, decode.computed, decode.computed_context = waiting, streams, context
    prompt = tokens + cached
    cost = PairCost(transfer_s=split_s - PREFILL.prefill_s(prompt), decode_cached_tokens=cached)
    return local_prefill_tokens(prefill, decode, prompt, cost, tpot_s)


def test_an_idle_decode_worker_computes_what_it_lacks_where_that_is_sooner() -> None:
    assert decided() == 100
    assert decided(split_s=0.11) == 0
    assert decided(tokens=20, cached=80) == 20


def test_unmeasured_workers_hand_off() -> None:
    assert decided(prefill_model=LatencyModel()) == 0
    assert decided(model=LatencyModel(None, DECODE)) == 100, "it counts as fast as the prefill worker"
    assert decided(model=LatencyModel(PREFILL)) == 100, "there is nobody to hold up"
    assert decided(model=LatencyModel(PREFILL), **BESIDE) == 0


def test_prompts_that_wait_there_already_come_first() -> None:
    assert decided(waiting=60) == 100
    assert decided(waiting=90) == 0


def test_without_a_target_long_prompts_are_handed_off() -> None:
    for streams in (0, 3):
        assert decided(MAX_TOKENS_WITHOUT_TARGET, split_s=9.0, streams=streams) > 0
        assert decided(MAX_TOKENS_WITHOUT_TARGET + 1, split_s=9.0, streams=streams) == 0
    assert decided(5000, split_s=9.0, tpot_s=0.05) == 5000


def test_beside_streams_a_prompt_takes_the_steps_that_their_target_leaves_time_for() -> None:
    assert decided(**BESIDE | {"split_s": 0.2}) == 100, "three steps of 65 ms"
    assert decided(**BESIDE | {"split_s": 0.19}) == 0
    assert decided(**BESIDE | {"split_s": 9.0, "tpot_s": 0.0415}) == 100, "16 tokens a step"
    assert decided(**BESIDE | {"split_s": 9.0, "tpot_s": 0.0405}) == 0, "the streams would miss it"


@given(
    st.integers(1, 5000),
    st.integers(0, 5000),
    st.floats(0, 10),
    st.integers(0, 50),
    st.one_of(st.none(), st.floats(1e-3, 1)),
)
def test_it_is_all_or_nothing_and_later_handoffs_are_avoided_sooner(
    tokens: int, waiting: int, split_s: float, streams: int, tpot_s: float | None
) -> None:
    facts: dict[str, Any] = {"streams": streams, "context": 100 * streams, "tpot_s": tpot_s}
    found = decided(tokens, split_s=split_s, waiting=waiting, **facts)
    assert found in (0, tokens)
    if found:
        assert decided(tokens, split_s=split_s + 1, waiting=waiting, **facts) == tokens
        assert decided(tokens, split_s=split_s, waiting=0, **facts) == tokens


def test_the_facts_of_a_pair_are_those_of_the_account() -> None:
    """What waits at the prefill worker, what is computed at the decode worker, and its streams' targets."""
    prefill = worker("p", "prefill", latency=MODEL.to_proto())
    decode = worker("d", "decode", running_requests=1, latency=MODEL.to_proto())
    loads = WorkerLoads.of([prefill, decode])
    pair = Pair(prefill, decode, PairCost(transfer_s=0.001, cached_tokens=90, decode_cached_tokens=90))

    def found(behind_queue: bool = True) -> int:
        return local_tokens_of_pair("auto", pair, 100, loads, 0.2, behind_queue=behind_queue)

    assert found() == 10
    flights = [
        Flight(prompt_tokens=50, uncached_tokens=50, expected_output=9, max_output=9) for _ in range(3)
    ]
    loads.route(flights[0], prefill.key, decode.key, 50, local_tokens=30)
    assert found() == 0, "30 tokens are to be computed there first"
    loads.route(flights[1], prefill.key, decode.key, 40)
    assert found() == 10, "40 tokens wait at the prefill worker"
    assert found(behind_queue=False) == 0
    flights[2].tpot_slo_s = 0.02
    loads.route(flights[2], prefill.key, decode.key, 50)
    loads.output(flights[2], 1)
    assert found() == 0, "its target leaves 9 ms a step"
    loads.remove(decode.key)
    assert found() == 0
