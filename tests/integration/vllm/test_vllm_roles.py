"""Workers of engine vllm with role both: prompts in both directions under little memory, and prompts computed where
they are decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import until, worker
from tests.support.engine.reference import Reference
from tests.support.waiting import PATIENCE_S

BLOCK, MAX_TOKENS = 32, 6
BLOCKS = 20
"""Two of the longest sequences."""
CONTEXT = 320
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def cluster_of(log_dir_factory: pytest.TempPathFactory, model: str, mode: str) -> Cluster:
    options = ["--dtype", "float32", "--context-tokens", str(CONTEXT), "--num-blocks", str(BLOCKS)]
    options += ["--max-running-requests", "4", "--heartbeat", "0.1", "--lease", "5"]
    return Cluster(
        log_dir_factory.mktemp("logs"),
        model=model,
        engine="vllm",
        both=2,
        worker_options=options,
        coordinator_options=["--local-prefill", mode],
    )


@pytest.fixture(scope="module")
async def cluster(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with running(cluster_of(tmp_path_factory, smollm2, "auto")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def text_tokens(smollm2: str) -> list[int]:
    return load_tokenizer(smollm2).encode(sentences(250, seed=5))


async def test_prompts_both_ways_with_room_for_few(
    cluster: Cluster, smollm2: str, text_tokens: list[int]
) -> None:
    """Each worker has blocks for two of the prompts: reservations that took all of them would wait for each other."""
    prompts = [text_tokens[40 * n : 40 * n + 9 * BLOCK] for n in range(12)]
    prompts += [text_tokens[7 * n : 7 * n + 40] for n in range(12)]
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        answers = await asyncio.gather(*(client.generate(prompt, **GREEDY) for prompt in prompts))
    reference = Reference(smollm2)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == reference.greedy(prompt, MAX_TOKENS)
    decoders = {answer.served_by.decode_worker for answer in answers}
    assert decoders == {"worker-0", "worker-1"}
    assert {answer.served_by.prefill_worker for answer in answers} & decoders, "nothing was handed off"
    await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_a_prompt_is_computed_where_it_is_decoded(
    smollm2: str, tmp_path_factory: pytest.TempPathFactory, text_tokens: list[int]
) -> None:
    """And with the prefix that it has cached, once the router knows of it."""
    prompt = text_tokens[100:230]
    expected = Reference(smollm2).greedy(prompt, MAX_TOKENS)
    async with running(cluster_of(tmp_path_factory, smollm2, "always")) as cluster:
        async with AsyncClient(cluster.target, timeout_s=300) as client, asyncio.timeout(PATIENCE_S):
            cached_tokens = 0
            while cached_tokens < 4 * BLOCK:
                answer = await client.generate(prompt, **GREEDY)
                assert (answer.served_by.prefill_worker, answer.timings.transfer_bytes) == ("", 0)
                assert list(answer.token_ids) == expected
                cached_tokens = answer.usage.cached_prompt_tokens
        await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_a_new_worker_computes_hot_prefixes_before_it_joins(
    smollm2: str, tmp_path_factory: pytest.TempPathFactory, text_tokens: list[int]
) -> None:
    hot = text_tokens[: 3 * BLOCK]
    options = ["--dtype", "float32", "--context-tokens", str(CONTEXT), "--num-blocks", str(BLOCKS)]
    log_dir = tmp_path_factory.mktemp("logs")
    cluster = Cluster(log_dir, model=smollm2, engine="vllm", worker_options=[*options, "--heartbeat", "0.1"])
    async with running(cluster), AsyncClient(cluster.target, timeout_s=300) as client:
        for last in (1, 2):
            await client.generate([*hot, last], **GREEDY)
        cluster.add_worker("prefill", "prefill-1")
        await cluster.wait_ready(prefill=2)
        warmed = cluster.members["coordinator"].wait_event("worker.warmed")
        assert (warmed["worker_id"], warmed["tokens"]) == ("prefill-1", 3 * BLOCK)
        cluster.members["prefill-0"].terminate()
        await until(cluster, lambda info: not worker(info, "prefill-0").worker_id, "the first one is gone")
        answer = await client.generate([*hot, 3], **GREEDY)
        assert (answer.served_by.prefill_worker, answer.usage.cached_prompt_tokens) == (
            "prefill-1",
            3 * BLOCK,
        )
        assert list(answer.token_ids) == Reference(smollm2).greedy([*hot, 3], MAX_TOKENS)
        await cluster.assert_no_leaks()
