"""Figures of the vLLM benchmark from known streams and turns."""

from __future__ import annotations

import pytest

from bench.peers.vllm_pair import Times, VllmPairTurn
from bench.vllm.rows import DecodeCase, TurnPair, cpu_row, decode_row, handoff_row, table
from bench.vllm.streams import DecodeTurn, Look, Stream, turn_of

CASE = DecodeCase("tiny-128k", 128_256, 2, 0.8)
FIRST, LAST = Look(1.0, {"front": 5.0, "engine": 8.0}), Look(2.0, {"front": 5.5, "engine": 9.0})


def test_a_turn_counts_what_comes_while_all_streams_decode() -> None:
    steady = Stream([0.5, *(1.05 + 0.1 * number for number in range(10)), 2.5], 12)
    slower = Stream([1.0 + 0.2 * number for number in range(12)], 12)
    turn = turn_of([steady, steady, slower], FIRST, LAST)
    assert turn.tpot_ms == pytest.approx(100.0), "the median"
    assert turn.tokens_per_s == pytest.approx(10 + 10 + 6)
    assert turn.cpu_us == pytest.approx({"front": 0.5e6 / 26, "engine": 1.0e6 / 26})


def test_several_tokens_may_come_in_an_event() -> None:
    pairs = Stream([1.05 + 0.2 * number for number in range(10)], 20)
    turn = turn_of([pairs], FIRST, LAST)
    assert turn.tpot_ms == pytest.approx(100.0)
    assert turn.tokens_per_s == pytest.approx(10)


def test_answers_that_are_too_short_to_overlap_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="ask for more tokens"):
        turn_of([Stream([1.1, 1.2, 1.3], 3), Stream([1.9, 2.1, 2.3], 3)], FIRST, LAST)


def test_ratios_are_those_of_neighbours_in_time() -> None:
    turns = [
        TurnPair(_turn(own), _turn(vllm), 0.02) for own, vllm in ((10.0, 10.0), (22.0, 20.0), (40.0, 30.0))
    ]
    row = decode_row(CASE, turns)
    assert (row.vocabulary, row.streams, row.temperature, row.repeats) == (128_256, 2, 0.8, 3)
    assert (row.tpot_ms, row.vllm_tpot_ms) == (22.0, 20.0)
    assert row.ratio_tpot == pytest.approx(1.1)
    assert row.ratio_throughput == pytest.approx(0.909)
    cpu = cpu_row(CASE, turns)
    assert (cpu.front_us, cpu.vllm_front_us, cpu.ratio_front) == (22.0, 20.0, 1.1)
    assert cpu.coordinator_us == 66.0


def test_the_second_token_of_vllms_pair_is_counted_from_the_prefill_servers_answer() -> None:
    own = Times(prefill_ms=100.0, handoff_ms=40.0, ttft_ms=100.0, second_ms=40.0, tpot_ms=20.0)
    vllm = Times(prefill_ms=125.0, handoff_ms=30.0, ttft_ms=155.0, second_ms=20.0, tpot_ms=20.0)
    row = handoff_row(512, [VllmPairTurn(own, vllm, 1.0, 0.0)])
    assert (row.second_token_ms, row.vllm_second_token_ms, row.ratio_second_token) == (40.0, 50.0, 0.8)
    assert (row.ttft_ms, row.vllm_ttft_ms, row.ratio_ttft) == (100.0, 155.0, 0.645)
    assert (row.vllm_prefill_ms, row.ratio_prefill) == (125.0, 0.8)
    assert table("Handoff", [row]).row_count == 1


def _turn(tpot_ms: float) -> DecodeTurn:
    return DecodeTurn(
        tpot_ms, 1e3 / tpot_ms, {"front": tpot_ms, "engine": 2 * tpot_ms, "coordinator": 3 * tpot_ms}
    )
