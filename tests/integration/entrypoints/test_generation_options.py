"""Generation options through a split pair with real weights: the handoff changes nothing of their meaning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from splitserve.client import AsyncClient, Completion
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.tokenizer import Tokenizer
from tests.support.clients.patient import PatientClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

STORY = "Once upon a time there was a"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
async def cluster(short_smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = ["--dtype", "float32", "--num-blocks", "400"]
    setup = Cluster(
        tmp_path_factory.mktemp("logs"), model=short_smollm2, engine="torch", worker_options=options
    )
    async with running(setup) as cluster:
        yield cluster
        await cluster.assert_no_leaks()


@pytest.fixture(scope="module")
def tokenizer(short_smollm2: str) -> Tokenizer:
    return load_tokenizer(short_smollm2)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with PatientClient(cluster.target, timeout_s=PATIENCE_S) as client:
        yield client


async def test_the_deltas_make_the_text(client: AsyncClient, tokenizer: Tokenizer) -> None:
    prompt = "Emojis: 😀 🎉 🚀 naïve café 東京"
    texts: list[str] = []
    last: Completion | None = None
    async for item in client.stream(prompt, temperature=1.0, seed=5, max_tokens=40, ignore_eos=True):
        if isinstance(item, Completion):
            last = item
        else:
            texts.append(item.text)
    assert last is not None
    assert "".join(texts) == last.text
    assert all("\ufffd" not in text for text in texts[:-1])
    whole = tokenizer.decode([*tokenizer.encode(prompt), *last.token_ids])
    assert whole.endswith(last.text)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_max_tokens(client: AsyncClient, max_tokens: int) -> None:
    answer = await client.generate(STORY, temperature=0.0, max_tokens=max_tokens)
    assert len(answer.token_ids) == max_tokens
    assert answer.finish_reason == "length"
    assert (answer.served_by.decode_worker == "") == (max_tokens == 1)


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(client: AsyncClient) -> None:
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "max_tokens": 16, "ignore_eos": True}
    alone = await client.generate(STORY, seed=42, **options)
    crowd = await asyncio.gather(*(client.generate(STORY, seed=n, **options) for n in (42, 43, 44, 45)))
    assert crowd[0].token_ids == alone.token_ids
    assert len({answer.token_ids for answer in crowd}) > 1
    assert alone.seed == 42


async def test_logit_bias_and_penalties_reach_both_workers(client: AsyncClient) -> None:
    free = await client.generate(STORY, temperature=0.0, max_tokens=8)
    banned = dict.fromkeys(free.token_ids, -100.0)
    other = await client.generate(STORY, temperature=0.0, max_tokens=8, logit_bias=banned)
    assert not set(other.token_ids) & set(free.token_ids)
    forced = await client.generate(STORY, temperature=0.0, max_tokens=6, logit_bias={100: 100.0})
    assert set(forced.token_ids) == {100}
    varied = await client.generate(
        STORY, temperature=0.0, max_tokens=16, logit_bias={100: 100.0, 101: 100.0}, frequency_penalty=2.0
    )
    assert set(varied.token_ids) == {100, 101}
