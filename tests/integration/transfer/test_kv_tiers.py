"""Workers with real weights in float32 and a pool of half their working set: answers are those of `transformers`.

Prefixes come back from host memory and, after the worker was killed, from the disk, or from a Mooncake Store in its
place; on the decode worker, too, where that is sooner than over the lane.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import eventually
from tests.support.engine.reference import Reference
from tests.support.tiers.mooncake_rig import mooncake_store
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

PROMPTS, TOKENS, ANSWER = 4, 96, 3
POOL_BLOCKS = 13
"""Of 16 tokens. A prompt has six full blocks."""
BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 4
LANE_BYTES_PER_S = 1e8
"""Slower than host memory on any machine."""


def tier_hits(cluster: Cluster, member: str) -> dict[str, float]:
    """Tokens whose KV a worker has read back, by tier."""
    return by_tier(cluster, member, "splitserve_kv_tier_hit_tokens")


def by_tier(cluster: Cluster, member: str, name: str) -> dict[str, float]:
    port = cluster.members[member].wait_event("metrics.ready")["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        families = text_string_to_metric_families(page.read().decode())
        (family,) = (each for each in families if each.name == name)
    return {sample.labels["tier"]: sample.value for sample in family.samples}


def prompts_and_answers(model: str) -> list[tuple[list[int], list[int]]]:
    """Prompts that do not fit the pool together, and what `transformers` answers."""
    tokenizer, reference = load_tokenizer(model), Reference(model)
    prompts = [tokenizer.encode(sentences(40, seed=seed))[: TOKENS + 5] for seed in range(PROMPTS)]
    return [(prompt, reference.greedy(prompt, ANSWER)) for prompt in prompts]


async def ask_all(client: AsyncClient, known: list[tuple[list[int], list[int]]]) -> None:
    for prompt, answer in known:
        got = await client.generate(prompt, temperature=0.0, max_tokens=ANSWER)
        assert list(got.token_ids) == answer


@pytest.mark.timeout(600)
async def test_prefixes_come_back_from_host_memory_and_disk(
    log_dir: Path, smollm2: str, tmp_path: Path
) -> None:
    known = prompts_and_answers(smollm2)
    options = ["--dtype", "float32", "--num-blocks", str(POOL_BLOCKS), "--metrics-port", "0"]
    options += ["--kv-host-tier-bytes", str(64 * BLOCK_BYTES), "--kv-disk-tier-path", str(tmp_path / "kv")]
    options += ["--kv-disk-tier-bytes", str(80 * BLOCK_BYTES)]
    options += ["--faults", json.dumps({"bandwidth_bytes_per_s": LANE_BYTES_PER_S})]
    setup = Cluster(log_dir, model=smollm2, engine="torch", worker_options=options)
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=200) as client:
        await ask_all(client, known)
        await ask_all(client, known)
        for member in ("prefill-0", "decode-0"):
            assert tier_hits(cluster, member)["host"] >= (PROMPTS - 1) * TOKENS, member
        await cluster.assert_no_leaks()
        kept = (PROMPTS - 1) * TOKENS // 16 * BLOCK_BYTES
        await eventually(
            lambda: by_tier(cluster, "prefill-0", "splitserve_kv_tier_bytes")["disk"] >= kept,
            "all but the last is on the disk",
        )
        cluster.members["prefill-0"].kill()
        cluster.add_worker("prefill", "prefill-0").wait_event("worker.ready")
        await cluster.wait_ready()
        await ask_all(client, known)
        assert tier_hits(cluster, "prefill-0")["disk"] >= (PROMPTS - 1) * TOKENS
        await cluster.assert_no_leaks()


@pytest.mark.timeout(300)
async def test_prefixes_come_back_from_a_mooncake_store(log_dir: Path, smollm2: str) -> None:
    """Skipped without its package, which is an extra."""
    node = mooncake_store(BLOCK_BYTES, 1, bytes(32), segment_bytes=2**28)
    known = prompts_and_answers(smollm2)
    options = ["--dtype", "float32", "--num-blocks", str(POOL_BLOCKS), "--metrics-port", "0"]
    options += ["--kv-host-tier-bytes", str(7 * BLOCK_BYTES), "--kv-store-master", node.address]
    options += ["--kv-disk-tier-bytes", str(80 * BLOCK_BYTES)]
    setup = Cluster(log_dir, model=smollm2, engine="torch", worker_options=options)
    try:
        async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=200) as client:
            await ask_all(client, known)
            await ask_all(client, known)
            assert tier_hits(cluster, "prefill-0")["disk"] >= TOKENS
            await cluster.assert_no_leaks()
            node.end_master()
            await ask_all(client, known)
            await cluster.assert_no_leaks()
    finally:
        node.close()
