"""Models that pool, with random weights: embeddings, scores and ranks are those of `transformers`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
import yaml
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from splitserve.security.api_keys import key_hash, key_metadata, new_key
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.tiny_models import CONTEXT, VOCABULARY, make_tiny_model, tiny_tokenizer
from tests.support.waiting import PATIENCE_S

EMBEDS, RANKS, CHATS = "vllm_qwen3", "ranker", "simulated"
CUT = 64
"""Dimensions of a shorter embedding; the model has 128."""
TEXTS = ["short", "a text of some words", "Ünïcödé 🎈", "x" * 300]
QUERY = "what is it?"
CLOSE = 2e-5
KEYS = {name: new_key() for name in ("root", "small")}
TENANTS: dict[str, dict[str, Any]] = {
    "root": {"admin": True},
    "small": {"max_concurrent_requests": 2, "requests_per_second": 20, "burst_seconds": 1},
}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def make_ranker(folder: Path) -> Path:
    """Saves a cross-encoder whose tokenizer tells the two texts of a pair apart."""
    backend = tiny_tokenizer().backend_tokenizer
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    special = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names)
    config = BertConfig(
        vocab_size=VOCABULARY + len(special),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=192,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        num_labels=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two models that pool and one that generates, behind one coordinator."""
    folder = tmp_path_factory.mktemp("pooling")
    embeds, ranker = make_tiny_model(EMBEDS, folder), make_ranker(folder / RANKS)
    vllm = ["--engine", "vllm", "--dtype", "float32", "--max-step-tokens", "512"]
    overrides = json.dumps({"matryoshka_dimensions": [CUT]})
    listed = [{"name": name, "key_hashes": [key_hash(KEYS[name])], **rest} for name, rest in TENANTS.items()]
    (folder / "tenants.yaml").write_text(yaml.safe_dump({"tenants": listed}))
    cluster = Cluster(
        folder,
        both=1,
        coordinator_options=[
            *("--batch-folder", str(folder / "batches")),
            *("--tenants", str(folder / "tenants.yaml")),
        ],
        api_key=KEYS["root"],
        http=True,
    )
    async with running(cluster, wait_ready=False):
        options = ["--engine-args", f"--runner pooling --hf-overrides '{overrides}'"]
        cluster.add_worker("both", "embeds", "--model", str(embeds), *vllm, *options)
        # vLLM chooses the runner itself.
        cluster.add_worker("both", "ranks", "--model", str(ranker), *vllm)
        await cluster.wait_ready(both=3)
        yield cluster
        await cluster.assert_no_leaks()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key=KEYS["root"], max_retries=0) as client:
        yield client


def embedded(folder: Path, ids: Sequence[int], dimensions: int | None = None) -> list[float]:
    """What `transformers` gives: the last token's state, cut and normalized."""
    with torch.inference_mode():
        state = AutoModel.from_pretrained(folder / EMBEDS)(torch.tensor([ids])).last_hidden_state[0, -1]
    vector: list[float] = torch.nn.functional.normalize(state[:dimensions], dim=0).tolist()
    return vector


def scored(folder: Path, documents: Sequence[str]) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(folder / RANKS)
    model = AutoModelForSequenceClassification.from_pretrained(folder / RANKS).eval()
    with torch.inference_mode():
        logits = [model(**tokenizer(QUERY, text, return_tensors="pt")).logits for text in documents]
    return [float(logit.sigmoid()) for logit in logits]


async def test_embeddings(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    ids = tokens_of(cluster)
    expected = [pytest.approx(embedded(cluster.log_dir, tokens), abs=CLOSE) for tokens in ids]
    # The SDK asks for base64.
    texts = await client.embeddings.create(model=EMBEDS, input=TEXTS)
    assert [entry.embedding for entry in texts.data] == expected
    assert texts.usage.prompt_tokens == texts.usage.total_tokens == sum(map(len, ids))
    floats = await client.embeddings.create(model=EMBEDS, input=TEXTS[0], encoding_format="float")
    assert [entry.embedding for entry in floats.data] == expected[:1]
    cut = await client.embeddings.create(model=EMBEDS, input=TEXTS[1], dimensions=CUT)
    assert cut.data[0].embedding == pytest.approx(embedded(cluster.log_dir, ids[1], CUT), abs=CLOSE)
    given = await client.embeddings.create(model=EMBEDS, input=ids)
    assert [entry.embedding for entry in given.data] == expected
    # As long as the context: nothing follows that would need room.
    longest = await client.embeddings.create(model=EMBEDS, input="y" * CONTEXT)
    assert longest.usage.prompt_tokens == CONTEXT
    many = await client.embeddings.create(model=EMBEDS, input=[f"text {n}" for n in range(300)])
    assert [entry.index for entry in many.data] == list(range(300))


def tokens_of(cluster: Cluster) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(cluster.log_dir / EMBEDS)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


async def test_scores_and_ranks(cluster: Cluster) -> None:
    expected = scored(cluster.log_dir, TEXTS)
    assert max(expected) - min(expected) > 0.01
    async with httpx.AsyncClient(base_url=cluster.base_url, headers=dict(key_metadata(KEYS["root"]))) as http:

        async def asked(path: str, **body: Any) -> Any:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        for names in (("text_1", "text_2"), ("queries", "documents")):
            answer = await asked("/score", model=RANKS, **dict(zip(names, (QUERY, TEXTS), strict=True)))
            assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=CLOSE)
        documents = [{"text": text} for text in TEXTS]
        ranked = await asked("/rerank", model=RANKS, query=QUERY, documents=documents, top_n=3)
        best = sorted(range(len(TEXTS)), key=lambda index: -expected[index])[:3]
        assert [entry["index"] for entry in ranked["results"]] == best
        assert [entry["document"]["text"] for entry in ranked["results"]] == [TEXTS[index] for index in best]
        scores = [entry["relevance_score"] for entry in ranked["results"]]
        assert scores == pytest.approx([expected[index] for index in best], abs=CLOSE)
        plain = await asked("/rerank", model=RANKS, query=QUERY, documents=TEXTS, return_documents=False)
        assert all(entry.keys() == {"index", "relevance_score"} for entry in plain["results"])
        # With embeddings it is the cosine of their angle.
        first, second = (embedded(cluster.log_dir, ids) for ids in tokens_of(cluster)[:2])
        cosine = sum(a * b for a, b in zip(first, second, strict=True))
        answer = await asked("/score", model=EMBEDS, text_1=TEXTS[0], text_2=TEXTS[1])
        assert answer["data"][0]["score"] == pytest.approx(cosine, abs=CLOSE)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/chat/completions",
        {"model": EMBEDS, "messages": [{"role": "user", "content": "Hi"}]},
        "model",
    ),
    "completion": ("/completions", {"model": RANKS, "prompt": "Hi"}, "model"),
    "generating model": ("/embeddings", {"model": CHATS, "input": "Hi"}, "model"),
    "ranking model": ("/embeddings", {"model": RANKS, "input": "Hi"}, "model"),
    "scores of a generating model": ("/score", {"model": CHATS, "text_1": "a", "text_2": "b"}, "model"),
    "dimensions": ("/embeddings", {"model": EMBEDS, "input": "Hi", "dimensions": 63}, "dimensions"),
    "too long": ("/embeddings", {"model": EMBEDS, "input": ["Hi", "y" * (CONTEXT + 1)]}, "input[1]"),
    "empty": ("/embeddings", {"model": EMBEDS, "input": ["Hi", ""]}, "input[1]"),
    "token ids": ("/embeddings", {"model": EMBEDS, "input": [[1], [2**20]]}, "input[1]"),
    "too many": ("/embeddings", {"model": EMBEDS, "input": ["x"] * 2049}, "input"),
    "truncation": (
        "/embeddings",
        {"model": EMBEDS, "input": "Hi", "truncate_prompt_tokens": 3},
        "truncate_prompt_tokens",
    ),
    "format": (
        "/embeddings",
        {"model": EMBEDS, "input": "Hi", "encoding_format": "bytes"},
        "encoding_format",
    ),
    "instruction": (
        "/score",
        {"model": RANKS, "text_1": "a", "text_2": "b", "instruction": "i"},
        "instruction",
    ),
    "pairs": ("/score", {"model": RANKS, "queries": ["a", "b"], "documents": ["a", "b", "c"]}, "queries"),
    "empty query": ("/rerank", {"model": EMBEDS, "query": "", "documents": ["a", "b"]}, "query"),
    # It is copied into few of its pairs before the first of them is refused.
    "long query": (
        "/rerank",
        {"model": RANKS, "query": "x" * 1_500_000, "documents": ["a"] * 2048},
        "documents[0]",
    ),
    "no document": ("/rerank", {"model": RANKS, "query": "a", "documents": []}, "documents"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_everything_else_is_refused_by_name(cluster: Cluster, case: str) -> None:
    path, body, named = REFUSED[case]
    async with httpx.AsyncClient(base_url=cluster.base_url, headers=dict(key_metadata(KEYS["root"]))) as http:
        answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, named), error


async def test_a_request_of_many_texts_waits_for_its_tenants_quota(cluster: Cluster) -> None:
    headers = dict(key_metadata(KEYS["small"]))
    async with httpx.AsyncClient(base_url=cluster.base_url, headers=headers, timeout=PATIENCE_S) as http:
        answer = await http.post("/embeddings", json={"model": EMBEDS, "input": [f"{n}" for n in range(40)]})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 40


async def test_batches_of_embeddings(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    lines = [
        {
            "custom_id": f"{n}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": EMBEDS, "input": text},
        }
        for n, text in enumerate(TEXTS)
    ]
    file = await client.files.create(
        file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch"
    )
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    async with asyncio.timeout(PATIENCE_S):
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None, batch
    results = [
        json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()
    ]
    dimensions = {len(line["response"]["body"]["data"][0]["embedding"]) for line in results}
    assert (len(results), dimensions) == (len(TEXTS), {128})


async def test_vllm_ends_with_a_worker_that_is_killed(cluster: Cluster) -> None:
    """The last test: the model has no worker any more."""
    worker = psutil.Process(cluster.members["ranks"].process.pid)
    engines = worker.children(recursive=True)
    assert engines
    cluster.members["ranks"].kill()
    _, alive = psutil.wait_procs(engines, PATIENCE_S)
    assert not alive
