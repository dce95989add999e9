"""Requests through workers with `--engine vllm`: tokens, refusals, clients that leave, workers that are killed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from itertools import count

import pytest

from splitserve.client import AsyncClient
from splitserve.errors import SplitserveError
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, decoding_worker, prompts_under_way, until, worker
from tests.support.engine.reference import Reference

BLOCK, CHUNK, MAX_TOKENS = 32, 64, 6
LONG = 900
"""More than a second of chunks."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
async def cluster(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = ["--dtype", "float32", "--context-tokens", "1024", "--max-step-tokens", str(CHUNK)]
    options += ["--kv-memory-bytes", "150000000", "--heartbeat", "0.1", "--lease", "5"]
    setup = Cluster(
        tmp_path_factory.mktemp("logs"), model=smollm2, engine="vllm", decode=2, worker_options=options
    )
    async with running(setup) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def text_tokens(smollm2: str) -> list[int]:
    return load_tokenizer(smollm2).encode(sentences(250, seed=3))


@pytest.fixture(scope="module")
def reference(smollm2: str) -> Reference:
    return Reference(smollm2)


async def test_greedy_tokens_equal_transformers(
    cluster: Cluster, text_tokens: list[int], reference: Reference
) -> None:
    """Side by side, and once more with what both sides have cached by then."""
    prompts = {length: text_tokens[length : 2 * length] for length in (1, 31, 32, 33, 63, 64, 65, 97, 130)}
    prompts[95] = prompts[130][:BLOCK] + text_tokens[: 95 - BLOCK]
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        for _ in range(2):
            answers = await asyncio.gather(
                *(
                    client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS)
                    for prompt in prompts.values()
                )
            )
            for (length, prompt), answer in zip(prompts.items(), answers, strict=True):
                assert list(answer.token_ids) == reference.greedy(prompt, MAX_TOKENS), length
                assert answer.served_by.transport == "nixl"
                assert answer.timings.transfer_bytes > 0
        assert answers[-1].usage.cached_prompt_tokens == 64
    await cluster.assert_no_leaks()


async def test_a_seed_gives_the_same_answer(cluster: Cluster, text_tokens: list[int]) -> None:
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        answers = [
            await client.generate(text_tokens[:150], temperature=0.9, seed=4, max_tokens=8, logprobs=1)
            for _ in range(2)
        ]
    assert answers[0].token_ids == answers[1].token_ids
    assert len(answers[0].logprobs) == 8


async def test_allowed_tokens_and_bad_words(cluster: Cluster, text_tokens: list[int]) -> None:
    """Both workers apply them: the first token is the prefill worker's."""
    prompt, options = text_tokens[:70], {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        free = await client.generate(prompt, **options)
        ids = free.token_ids
        narrow = await client.generate(prompt, **options, allowed_token_ids=[ids[1], ids[3]])
        assert set(narrow.token_ids) <= {ids[1], ids[3]}
        pairs = re.findall(r"(?=\b(\w+ \w+)\b)", free.text)
        bad = [pairs[0].split()[0], *pairs]
        other = await client.generate(prompt, **options, bad_words=bad)
        assert len(pairs) > 4
        assert not [word for word in bad if re.search(rf"\b{word}\b", other.text)], (free.text, other.text)
    await cluster.assert_no_leaks()


async def test_clients_that_leave(cluster: Cluster, text_tokens: list[int]) -> None:
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        prompts = (text_tokens[n : n + LONG] for n in count())
        early = await prompts_under_way(cluster, client, prompts, 6, max_tokens=5)
        late = Reading(client, text_tokens[:40], max_tokens=300, ignore_eos=True)
        for reading in early:
            await reading.leave()
        await late.got(3)
        await late.leave()
        await cluster.assert_no_leaks()


async def test_a_killed_decode_worker_is_resumed(cluster: Cluster, text_tokens: list[int]) -> None:
    greedy = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0}
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        undisturbed = await client.generate(text_tokens[50:120], **greedy)
        await cluster.assert_no_leaks()
        reading = Reading(client, text_tokens[50:120], **greedy)
        await reading.got(5)
        busy = await decoding_worker(cluster)
        cluster.members[busy].kill()
        answer = await reading.task
        assert answer.token_ids == undisturbed.token_ids
        assert answer.text == undisturbed.text
        await cluster.assert_no_leaks()


async def test_a_killed_prefill_worker_leaves_nothing(cluster: Cluster, text_tokens: list[int]) -> None:
    """The last test: the cluster has no prefill worker after it."""
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        reading = Reading(client, text_tokens[100 : 100 + LONG], max_tokens=5)
        await until(
            cluster, lambda info: worker(info, "prefill-0").running_requests, "the prompt is computed"
        )
        cluster.members["prefill-0"].kill()
        with pytest.raises(SplitserveError):
            await reading.task
        await cluster.assert_no_leaks()
