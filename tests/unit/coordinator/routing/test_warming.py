"""Warm-up of new workers: which prefixes are hot, what is kept of prompts, and when a cold worker joins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.routing.warming import hottest
from coordinator.workers.prefix_index import (
    MAX_PROMPT_TOKENS,
    MAX_RECENT_TOKENS,
    PrefixIndex,
    RecentPrompt,
    RecentPrompts,
)
from coordinator.workers.registry import Registry
from coordinator.workers.rotation import JOIN_WAIT_S
from coordinator.workers.snapshot import Model
from splitserve.generation.kv_blocks import Adapter, block_keys, chain_salt
from splitserve.v1 import registry_pb2
from tests.support.cluster.registrations import registration

BLOCK = 4
MODEL = Model("m", "m", 2**20, 1000, block_size_tokens=BLOCK)
A, B, C = [1] * 8, [2] * 8, [3] * 12
"""Beginnings of two blocks, two blocks and three."""
PREFILL, DECODE, BOTH = registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE, registry_pb2.ROLE_BOTH


def recent(*prompts: Sequence[int], salt: bytes = b"", adapter: Adapter | None = None) -> list[RecentPrompt]:
    kept = RecentPrompts(1000)
    for prompt in prompts:
        add(kept, prompt, salt, adapter)
    return list(kept.of("m"))


def add(
    kept: RecentPrompts, prompt: Sequence[int], salt: bytes = b"", adapter: Adapter | None = None
) -> None:
    keys = block_keys(prompt, BLOCK, chain_salt(salt, adapter), 2**20)
    model = Model("m", "m", 2**20, 1000, BLOCK, adapter)
    kept.add(model, tuple(prompt), keys, salt)


def tokens(prefixes: Sequence[RecentPrompt]) -> list[list[int]]:
    return [list(prefix.token_ids) for prefix in prefixes]


def test_a_hot_prefix_is_what_prompts_share_and_the_hottest_comes_first() -> None:
    prompts = recent([*A, 9, 9, 9, 9], [*B, 5], [*B, 6], [*A, 7, 7, 7, 7], [*B, 7], C)
    assert tokens(hottest(prompts, BLOCK, 8, 1000)) == [B, A]
    assert tokens(hottest(prompts, BLOCK, 1, 1000)) == [B]


def test_what_one_prompt_alone_begins_with_is_not_hot() -> None:
    assert hottest([], BLOCK, 8, 1000) == []
    assert hottest(recent(A, B, C, [1, 1, 1]), BLOCK, 8, 1000) == []


def test_a_longer_prefix_takes_the_place_of_its_beginning() -> None:
    longer = [*A, 4, 4, 4, 4]
    prompts = recent([*A, 5], [*A, 6], [*longer, 1], [*longer, 2])
    assert tokens(hottest(prompts, BLOCK, 1, 1000)) == [longer]


def test_the_bound_on_tokens_holds_and_smaller_ones_still_fit() -> None:
    prompts = recent(C, C, C, A, A, B, B)
    assert tokens(hottest(prompts, BLOCK, 8, 20)) == [C, A]
    assert tokens(hottest(prompts, BLOCK, 8, 11)) == [A]
    assert hottest(prompts, BLOCK, 8, 7) == []


def test_equal_tokens_of_two_tenants_or_of_an_adapter_do_not_make_a_hot_prefix() -> None:
    adapter = Adapter("style", "ab" * 32)
    prompts = [*recent(A), *recent(A, salt=b"t"), *recent(A, adapter=adapter)]
    assert hottest(prompts, BLOCK, 8, 1000) == []
    (one,) = hottest([*prompts, *recent(A, salt=b"t")], BLOCK, 8, 1000)
    assert (one.cache_salt, one.adapter) == (b"t", None)
    (other,) = hottest([*prompts, *recent(A, adapter=adapter)], BLOCK, 8, 1000)
    assert (other.cache_salt, other.adapter) == (b"", adapter)


def test_the_latest_prompts_are_kept_within_bounds() -> None:
    kept = RecentPrompts(3)
    for number in range(5):
        add(kept, [number] * BLOCK)
    assert tokens(kept.of("m")) == [[2] * BLOCK, [3] * BLOCK, [4] * BLOCK]
    kept = RecentPrompts(1000)
    long = (1,) * (MAX_PROMPT_TOKENS + 5 * BLOCK)
    for _ in range(2 * MAX_RECENT_TOKENS // MAX_PROMPT_TOKENS):
        kept.add(MODEL, long, tuple(range(len(long) // BLOCK)), b"")
    assert {len(prompt.token_ids) for prompt in kept.of("m")} == {MAX_PROMPT_TOKENS}
    assert {len(prompt.keys) for prompt in kept.of("m")} == {MAX_PROMPT_TOKENS // BLOCK}
    assert sum(len(prompt.token_ids) for prompt in kept.of("m")) == MAX_RECENT_TOKENS
    assert kept.of("another") == ()
    nothing = RecentPrompts(0)
    add(nothing, A)
    assert nothing.of("m") == ()


def serving() -> Registry:
    """p0 and d0 serve the model "words", whose latest prompts are known."""
    registry = Registry(60.0, PrefixIndex(recent=RecentPrompts(8)))
    registry.register(registration("p0", PREFILL), 0.0)
    registry.register(registration("d0", DECODE), 0.0)
    registry.set_output_open(("d0", 1), True)
    report(registry, "d0", 0.0)
    report(registry, "p0", 0.0)
    registry.prefixes.recent.add(Model("words", "words", 64, 9, BLOCK), tuple(A), (1, 2), b"")
    return registry


def report(registry: Registry, name: str, now: float) -> None:
    """Of a worker that is connected to all peers."""
    worker = registry.get((name, 1))
    assert worker is not None
    peers = [endpoint.agent_id for endpoint in registry.peers_of(worker)]
    made = registry_pb2.ReportRequest(worker_id=name, epoch=1, connected_agent_ids=peers)
    registry.report(made, now)


def joined(registry: Registry) -> list[str]:
    return [worker.worker_id for worker in registry.snapshot().workers if worker.joined]


@pytest.mark.parametrize("role", [PREFILL, BOTH])
def test_a_new_worker_joins_once_it_is_warmed(role: registry_pb2.Role.ValueType) -> None:
    registry = serving()
    worker = registry.register(registration("new", role), 1.0)
    assert registry.cold_workers() == []  # it has not reported
    registry.set_output_open(worker.key, True)
    for name in ("new", "p0", "new"):
        report(registry, name, 1.0)
    assert [cold.key for cold in registry.cold_workers()] == [worker.key]
    assert joined(registry) == ["d0", "p0"]
    version = registry.version
    registry.warmed(worker.key)
    assert joined(registry) == ["d0", "new", "p0"]
    assert registry.version > version
    assert registry.cold_workers() == []


def test_who_only_decodes_is_not_warmed_and_neither_is_the_first_worker_of_a_model() -> None:
    registry = serving()
    registry.register(registration("d1", DECODE), 1.0)
    registry.set_output_open(("d1", 1), True)
    registry.register(registration("q0", PREFILL, model="others"), 1.0)
    for name in ("d1", "q0", "p0"):
        report(registry, name, 1.0)
    assert joined(registry) == ["d0", "d1", "p0", "q0"]


def test_a_cold_worker_joins_at_once_when_no_other_computes_prompts_any_more() -> None:
    registry = serving()
    registry.register(registration("p1", PREFILL), 1.0)
    report(registry, "p1", 1.0)
    assert joined(registry) == ["d0", "p0"]
    registry.drop(("p0", 1), "test")
    report(registry, "p1", 1.1)
    assert joined(registry) == ["d0", "p1"]


def test_a_worker_that_nobody_warms_joins_in_the_end() -> None:
    registry = serving()
    registry.register(registration("p1", PREFILL), 1.0)
    report(registry, "p1", 1.0)
    report(registry, "p1", 1.0 + JOIN_WAIT_S - 0.1)
    assert joined(registry) == ["d0", "p0"]
    report(registry, "p1", 1.0 + JOIN_WAIT_S)
    assert joined(registry) == ["d0", "p0", "p1"]
