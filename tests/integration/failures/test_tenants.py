"""Tenants cannot look into each other's prefix caches, by counts, by timing or by hash (failure case 22)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import yaml

from splitserve.client import Completion
from splitserve.errors import InvalidArgumentError
from splitserve.generation.kv_blocks import extend_block_hashes
from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc
from splitserve.security.api_keys import key_hash, new_key
from splitserve.v1 import decode_pb2, generation_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import tokens, worker
from tests.support.waiting import PATIENCE_S

KEYS = {name: new_key() for name in ("alice", "bob", "carol", "dave", "root")}
PROMPT_TOKENS = 160
PROMPT_TOKEN_S = 0.002
WHOLE_PROMPT_MS = PROMPT_TOKENS * PROMPT_TOKEN_S * 1e3

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("tenants")
    tenants = [{"name": name, "key_hashes": [key_hash(key)]} for name, key in KEYS.items()]
    tenants[-1]["admin"] = True
    for friend in tenants[2:4]:
        friend["shared_cache_group"] = "friends"
    (folder / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    made = Cluster(
        folder,
        coordinator_options=["--tenants", str(folder / "tenants.yaml")],
        worker_options=["--require-cache-salt", "--simulated-prefill-token-s", str(PROMPT_TOKEN_S)],
        api_key=KEYS["root"],
    )
    async with running(made):
        yield made


async def ask(cluster: Cluster, name: str, prompt: Sequence[int]) -> Completion:
    async with cluster.client(api_key=KEYS[name]) as client:
        return await client.generate(list(prompt), max_tokens=3, temperature=0)


async def test_no_hit_across_tenants(cluster: Cluster) -> None:
    prompt = tokens(PROMPT_TOKENS, 1)
    cold = await ask(cluster, "alice", prompt)
    warm = await ask(cluster, "alice", prompt)
    probe = await ask(cluster, "bob", prompt)
    own = await ask(cluster, "bob", prompt)
    # By count, on both sides of the split.
    for first, again in ((cold, warm), (probe, own)):
        assert (first.usage.cached_prompt_tokens, first.usage.decode_cached_tokens) == (0, 0)
        assert again.usage.cached_prompt_tokens >= PROMPT_TOKENS - 16
        assert again.usage.decode_cached_tokens >= PROMPT_TOKENS - 16
    # By timing: bob's first time takes as long as anybody's, not as long as alice's later ones.
    async with asyncio.timeout(PATIENCE_S):  # what else the machine does may make one of them slow
        again = warm
        while again.timings.prefill_ms >= WHOLE_PROMPT_MS / 2:
            again = await ask(cluster, "alice", prompt)
    assert probe.timings.prefill_ms >= WHOLE_PROMPT_MS * 0.95
    # By what is sent from worker to worker.
    assert probe.timings.transfer_bytes == cold.timings.transfer_bytes > warm.timings.transfer_bytes
    # The answers are the same all the same.
    assert cold.token_ids == warm.token_ids == probe.token_ids
    await cluster.assert_no_leaks()


async def test_a_group_shares_because_it_says_so(cluster: Cluster) -> None:
    prompt = tokens(PROMPT_TOKENS, 2)
    assert (await ask(cluster, "carol", prompt)).usage.cached_prompt_tokens == 0
    assert (await ask(cluster, "dave", prompt)).usage.cached_prompt_tokens > 0
    assert (await ask(cluster, "alice", prompt)).usage.cached_prompt_tokens == 0


def test_hashes_cannot_be_computed_without_the_salt() -> None:
    prompt = tokens(PROMPT_TOKENS, 3)
    chains: list[set[bytes]] = []
    for salt in (b"", b"a" * 16, b"b" * 16):
        hashes: list[bytes] = []
        extend_block_hashes(hashes, prompt, 16, salt, PROMPT_TOKENS // 16)
        chains.append(set(hashes))
    assert len(set.union(*chains)) == 3 * PROMPT_TOKENS // 16


async def test_workers_refuse_what_would_share_with_everybody(cluster: Cluster) -> None:
    async with cluster.client() as client:
        address = worker(await client.server_info(), "decode-0").address
    request = decode_pb2.ReserveRequest(
        request_id="r",
        coordinator_id="c",
        attachment=1,
        token_ids=[5, 6, 7],
        stop=generation_pb2.StopParams(max_tokens=3),
        writer_agent_id="w",
    )
    request.timeout.FromSeconds(60)
    async with make_channel(address) as channel:
        stub = DecodeServiceStub(channel)
        outputs = stub.StreamOutputs(decode_pb2.StreamOutputsRequest(coordinator_id="c", attachment=1))
        await outputs.read()
        with pytest.raises(Exception, match=r"cache_salt must have 1\.\.64 bytes") as caught:
            await stub.Reserve(request, timeout=PATIENCE_S)
        outputs.cancel()
    error = error_from_rpc(caught.value)  # type: ignore[arg-type]
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "cache_salt"
