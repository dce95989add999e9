"""The replay of `bench.kv_tiers`: what tiers can add to the hits of a pool."""

from __future__ import annotations

from bench.kv_tiers.__main__ import conversation_prompts
from bench.kv_tiers.conversations import Conversations
from bench.kv_tiers.shares import share_rows

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
    assert 0 < shares[0, 0, "age"] < shares[80, 0, "value"] < endless
    assert shares[everything, 0, "value"] == shares[40, everything, "value"] == endless
    assert all(row.of_endless <= 1 for row in rows)
