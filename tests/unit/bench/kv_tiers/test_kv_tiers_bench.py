"""The replay of `bench.kv_tiers`: what tiers can add to the hits of a pool."""

from __future__ import annotations

from autoscaler.simulation.traces.trace import TraceRequest
from bench.kv_tiers.__main__ import conversation_prompts
from bench.kv_tiers.conversations import Conversations
from bench.kv_tiers.shares import share_rows
from bench.kv_tiers.trace_replay import distinct_blocks, endless_share, sampled, scaled

TRACE = Conversations(users=6, turns=4)


def test_prompts_go_on_from_what_was_said() -> None:
    prompts = TRACE.prompts()
    assert len(prompts) == 24
    assert prompts == TRACE.prompts()
    begun = [
        prompt for prompt in prompts if any(prompt[: len(other)] == other != prompt for other in prompts)
    ]
    assert len(begun) == 18


def test_more_memory_finds_more_up_to_all_of_it() -> None:
    prompts = conversation_prompts(TRACE)
    everything = len({each for prompt in prompts for each in prompt.hashes})
    rows = share_rows("t", prompts, [(40, 0, 0), (40, 80, 0), (40, everything, 0), (40, 40, everything)])
    shares = {(row.host_blocks, row.disk_blocks, row.eviction): row.hit_share for row in rows}
    endless = rows[0].hit_share_endless
    assert 0 < shares[0, 0, "age"] < shares[80, 0, "history"] < endless
    assert shares[everything, 0, "history"] == shares[40, everything, "history"] == endless
    assert all(row.of_endless <= 1 for row in rows)


def request(at_s: float, blocks: tuple[int, ...], tokens: int) -> TraceRequest:
    return TraceRequest(at_s, tokens, 100, blocks)


MIXED = [
    request(0.0, (0, 1), 1100),
    request(3.0, (0, 2, 3), 1536),
    request(9.0, (0, 1, 4), 1700),
    request(12.0, (0, 5), 600),
]


def test_of_a_conversation_all_requests_are_taken() -> None:
    for seed in range(6):
        taken = sampled(MIXED, 2, seed)
        assert len(taken) >= 2
        assert (MIXED[0] in taken) == (MIXED[2] in taken)
    assert sampled(MIXED, 99) == MIXED


def test_prompts_are_a_thirty_second_as_long_and_share_what_the_trace_shares() -> None:
    first, other, again, last = scaled(MIXED, 6.0)
    assert [each.arrival_s for each in (first, other, again, last)] == [0.0, 1.5, 4.5, 6.0]
    assert [len(each.tokens) for each in (first, other, again, last)] == [34, 48, 53, 18]
    assert first.tokens[:32] == again.tokens[:32]
    assert first.tokens[32:] != again.tokens[32:34]
    assert first.tokens[:16] == other.tokens[:16] != other.tokens[16:32] != first.tokens[16:32]
    assert distinct_blocks([first, other, again, last]) == 5
    found = 16 + 32 + 16
    assert endless_share([first, other, again, last]) == found / (34 + 48 + 53 + 18)
