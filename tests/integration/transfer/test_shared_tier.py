"""Real weights in float32: what a worker has computed, another one reads after its death, and answers the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.integration.transfer.test_kv_tiers import ANSWER, BLOCK_BYTES, TOKENS, tier_hits
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.tiers.mooncake_rig import mooncake_store

PROMPTS = 2


async def answers(client: AsyncClient, prompts: list[list[int]]) -> list[list[int]]:
    got = [await client.generate(prompt, temperature=0.0, max_tokens=ANSWER) for prompt in prompts]
    return [list(each.token_ids) for each in got]


@pytest.fixture(params=["folder", "mooncake"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """Options for a store that outlives workers; Mooncake is skipped without its package, which is an extra."""
    if request.param == "folder":
        yield ["--kv-disk-tier-path", str(tmp_path / "kv")]
        return
    node = mooncake_store(BLOCK_BYTES, 1, bytes(32), segment_bytes=2**28)
    yield ["--kv-store-master", node.address]
    node.close()


@pytest.mark.timeout(120)
async def test_another_worker_reads_what_a_dead_one_has_written(
    log_dir: Path, smollm2: str, place: list[str]
) -> None:
    tokenizer = load_tokenizer(smollm2)
    prompts = [tokenizer.encode(sentences(40, seed=seed))[: TOKENS + 5] for seed in range(PROMPTS)]
    options = ["--dtype", "float32", "--num-blocks", "24", "--metrics-port", "0", "--kv-tier-sharing", "on"]
    options += ["--kv-host-tier-bytes", str(32 * BLOCK_BYTES), *place]
    options += ["--kv-disk-tier-bytes", str(1028 * BLOCK_BYTES)]
    setup = Cluster(log_dir, model=smollm2, engine="torch", worker_options=options)
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=100) as client:
        before = await answers(client, prompts)
        cluster.members["prefill-0"].kill()
        cluster.add_worker("prefill", "prefill-1").wait_event("worker.ready")
        await cluster.wait_ready()
        assert await answers(client, prompts) == before
        assert tier_hits(cluster, "prefill-1")["disk"] >= (PROMPTS - 1) * TOKENS
        await cluster.assert_no_leaks()
