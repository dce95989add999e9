"""When the decode worker computes a prompt itself: the decision, from the workers' latency models alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.request.state import PairCost
from coordinator.routing.local_prefill import (
    MAX_TOKENS_WITHOUT_TARGET,
    LocalPrefillFacts,
    facts_of_pair,
    local_prefill_tokens,
)
from coordinator.routing.router import Pair
from coordinator.workers.load import Flight, WorkerLoads
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency
from tests.support.clients.admission_parts import worker
from tests.support.latency import latency as latency_of

PREFILL = PrefillLatency(base_s=0.01, token_s=0.001)
DECODE = DecodeLatency(base_s=0.01, sequence_s=0.001)
MODEL = LatencyModel(PREFILL, DECODE)
IDLE = LocalPrefillFacts(tokens=100, cached_tokens=0, split_s=0.2, model=MODEL)
BESIDE = replace(IDLE, streams=5, tpot_s=0.065)
"""A step of 15 ms leaves 50 ms, in which 40 prompt tokens are computed."""


def test_an_idle_decode_worker_computes_what_it_lacks_where_that_is_sooner() -> None:
    assert local_prefill_tokens(IDLE) == 100
    assert local_prefill_tokens(replace(IDLE, split_s=0.11)) == 0
    assert local_prefill_tokens(replace(IDLE, tokens=20, cached_tokens=80)) == 20


def test_unmeasured_workers_hand_off() -> None:
    assert local_prefill_tokens(replace(IDLE, split_s=None)) == 0
    assert local_prefill_tokens(replace(IDLE, model=LatencyModel(None, DECODE))) == 0
    assert local_prefill_tokens(replace(IDLE, model=LatencyModel(PREFILL))) == 100, (
        "there is nobody to hold up"
    )
    assert local_prefill_tokens(replace(BESIDE, model=LatencyModel(PREFILL))) == 0


def test_prompts_that_wait_there_already_come_first() -> None:
    assert local_prefill_tokens(replace(IDLE, waiting_tokens=60)) == 100
    assert local_prefill_tokens(replace(IDLE, waiting_tokens=90)) == 0


def test_without_a_target_long_prompts_are_handed_off() -> None:
    for streams in (0, 3):
        facts = replace(IDLE, streams=streams, split_s=9.0)
        assert local_prefill_tokens(replace(facts, tokens=MAX_TOKENS_WITHOUT_TARGET)) > 0
        assert local_prefill_tokens(replace(facts, tokens=MAX_TOKENS_WITHOUT_TARGET + 1)) == 0
    assert local_prefill_tokens(replace(IDLE, tokens=5000, split_s=9.0, tpot_s=0.05)) == 5000


def test_beside_streams_a_prompt_takes_the_steps_that_their_target_leaves_time_for() -> None:
    assert local_prefill_tokens(replace(BESIDE, split_s=0.2)) == 100, "three steps of 65 ms"
    assert local_prefill_tokens(replace(BESIDE, split_s=0.19)) == 0
    assert local_prefill_tokens(replace(BESIDE, split_s=9.0, tpot_s=0.0415)) == 100, "16 tokens a step"
    assert local_prefill_tokens(replace(BESIDE, split_s=9.0, tpot_s=0.0405)) == 0, "the streams would miss it"


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
    facts = LocalPrefillFacts(tokens, 0, split_s, MODEL, waiting, streams, 100 * streams, tpot_s)
    found = local_prefill_tokens(facts)
    assert found in (0, tokens)
    if found:
        assert local_prefill_tokens(replace(facts, split_s=split_s + 1)) == tokens
        assert local_prefill_tokens(replace(facts, waiting_tokens=0)) == tokens


def test_the_facts_of_a_pair_are_those_of_the_account() -> None:
    message = LatencyModel(PREFILL).to_proto()
    prefill, decode = (
        worker("p", "prefill", latency=message),
        worker("d", "decode", running_requests=1, latency=latency_of()),
    )
    loads = WorkerLoads.of([prefill, decode])
    pair = Pair(prefill, decode, PairCost(transfer_s=0.5, cached_tokens=60, decode_cached_tokens=90))
    facts = facts_of_pair(pair, 100, loads, 0.2)
    assert facts is not None
    assert (facts.tokens, facts.cached_tokens, facts.tpot_s) == (10, 90, 0.2)
    assert facts.split_s == pytest.approx(0.01 + 0.04 + 0.5)
    assert facts.model.prefill == PREFILL, "until the decode worker has measured its own"
    flights = [
        Flight(prompt_tokens=50, uncached_tokens=50, expected_output=9, max_output=9) for _ in range(3)
    ]
    flights[0].tpot_slo_s = 0.1
    loads.route(flights[0], prefill.key, decode.key, 50)
    loads.output(flights[0], 1)
    loads.route(flights[1], prefill.key, decode.key, 40)
    loads.route(flights[2], prefill.key, decode.key, 50, local_tokens=30)
    facts = facts_of_pair(pair, 100, loads, 0.2)
    assert facts is not None
    assert facts.split_s == pytest.approx(0.04 + 0.01 + 0.04 + 0.5)
    unqueued = facts_of_pair(pair, 100, loads, 0.2, behind_queue=False)
    assert unqueued == replace(facts, split_s=pytest.approx(0.01 + 0.04 + 0.5))
    assert (facts.streams, facts.context_tokens, facts.waiting_tokens, facts.tpot_s) == (1, 51, 30, 0.1)
    loads.remove(decode.key)
    assert facts_of_pair(pair, 100, loads, 0.2) is None
