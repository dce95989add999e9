"""Real weights in float32: what a worker has computed, another one reads after its death, and answers the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.cluster.process_specs import SERVING_STATES
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.integration.transfer.test_kv_tiers import ANSWER, BLOCK_BYTES, TOKENS, by_tier, tier_hits
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import eventually, until, worker
from tests.support.tiers.mooncake_rig import mooncake_store
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

pytestmark = pytest.mark.slow

PROMPTS = 5
"""One of them is read, at least: an answer of the store that is late on a busy machine costs its prompt the read."""
LANE_BYTES_PER_S = 1e7
"""Slower than any disk."""


async def answers(client: AsyncClient, prompts: list[list[int]]) -> list[list[int]]:
    got = [await client.generate(prompt, temperature=0.0, max_tokens=ANSWER) for prompt in prompts]
    return [list(each.token_ids) for each in got]


async def assert_the_next_one_reads(
    cluster: Cluster, client: AsyncClient, pool: str, prompts: list[list[int]], shared: list[str]
) -> None:
    """The pool's first worker writes what the prompts have, and is killed; one that comes after it reads."""
    before = await answers(client, prompts)
    written = PROMPTS * TOKENS // 16 * BLOCK_BYTES
    await eventually(
        lambda: by_tier(cluster, f"{pool}-0", "splitserve_kv_tier_bytes")["disk"] >= written,
        "all whole blocks are written",
    )
    cluster.members[f"{pool}-0"].kill()
    cluster.add_worker(pool, f"{pool}-1", *shared)
    await until(cluster, lambda info: worker(info, f"{pool}-1").state in SERVING_STATES, f"{pool}-1 serves")
    await assert_answered_by_reading(cluster, client, f"{pool}-1", prompts, before)


async def assert_answered_by_reading(
    cluster: Cluster, client: AsyncClient, member: str, prompts: list[list[int]], before: list[list[int]]
) -> None:
    """The same answers, until the worker has read as many tokens as one of the prompts has."""
    for prompt, answer in zip(prompts, before, strict=True):
        assert await answers(client, [prompt]) == [answer]
        if tier_hits(cluster, member)["disk"] >= TOKENS:
            return
    raise AssertionError(f"{member} has read {tier_hits(cluster, member)} tokens")


@pytest.fixture(params=["folder", "mooncake"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """Options for a store that outlives workers; Mooncake is skipped without its package, which is an extra."""
    if request.param == "folder":
        yield ["--kv-disk-tier-path", str(tmp_path / "kv")]
        return
    node = mooncake_store(BLOCK_BYTES, 1, bytes(32), segment_bytes=2**28)
    yield ["--kv-store-master", node.address]
    node.close()


@pytest.mark.timeout(LEAST_TIMEOUT_S)
async def test_another_worker_reads_what_a_dead_one_has_written(
    log_dir: Path, smollm2: str, place: list[str]
) -> None:
    tokenizer = load_tokenizer(smollm2)
    prompts = [tokenizer.encode(sentences(40, seed=seed))[: TOKENS + 5] for seed in range(PROMPTS)]
    options = ["--dtype", "float32", "--num-blocks", "24", "--metrics-port", "0"]
    # Prefill workers alone: the decode worker has the prompts' KV, too, and writes none of it.
    shared = ["--kv-tier-sharing", "on", "--kv-host-tier-bytes", str(32 * BLOCK_BYTES), *place]
    shared += ["--kv-disk-tier-bytes", str(1028 * BLOCK_BYTES)]
    setup = Cluster(log_dir, model=smollm2, engine="torch", prefill=0, decode=0, worker_options=options)
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        cluster.add_worker("prefill", "prefill-0", *shared)
        cluster.add_worker("decode", "decode-0")
        await cluster.wait_ready(prefill=1, decode=1)
        await assert_the_next_one_reads(cluster, client, "prefill", prompts, shared)
        await cluster.assert_no_leaks()


@pytest.mark.timeout(LEAST_TIMEOUT_S)
async def test_a_decode_worker_reads_what_a_dead_one_has_written_in_place_of_a_transfer(
    log_dir: Path, smollm2: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(smollm2)
    prompts = [tokenizer.encode(sentences(40, seed=seed))[: TOKENS + 5] for seed in range(PROMPTS)]
    options = ["--dtype", "float32", "--num-blocks", "24", "--metrics-port", "0"]
    options += ["--faults", json.dumps({"bandwidth_bytes_per_s": LANE_BYTES_PER_S})]
    shared = ["--kv-tier-sharing", "on", "--kv-host-tier-bytes", str(32 * BLOCK_BYTES)]
    shared += ["--kv-disk-tier-path", str(tmp_path), "--kv-disk-tier-bytes", str(1028 * BLOCK_BYTES)]
    setup = Cluster(log_dir, model=smollm2, engine="torch", prefill=0, decode=0, worker_options=options)
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        cluster.add_worker("prefill", "prefill-0")
        cluster.add_worker("decode", "decode-0", *shared)
        await cluster.wait_ready(prefill=1, decode=1)
        await assert_the_next_one_reads(cluster, client, "decode", prompts, shared)
        await cluster.assert_no_leaks()
