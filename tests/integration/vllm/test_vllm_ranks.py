"""Workers with `--engine vllm` and tensor parallelism hand KV to each other, whatever the number of their ranks."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import psutil
import pytest

from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, prompts_under_way
from tests.support.engine.reference import Reference
from tests.support.engine.tiny_models import make_tiny_model

BLOCK, CHUNK, MAX_TOKENS = 32, 64, 6
TWO_RANKS = "--engine-args=--tensor-parallel-size 2"
TWO_STAGES = "--engine-args=--pipeline-parallel-size 2"
LEFT_BEHIND = ("splitserve-vllm-*", "vllm_dist_*", "????????-????-????-????-????????????")
"""The last ones are vLLM's sockets."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama_4_heads", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text_tokens(model: str) -> list[int]:
    return load_tokenizer(model).encode(sentences(60, seed=3))


@pytest.fixture(scope="module")
def reference(model: str) -> Reference:
    return Reference(model)


def leftovers(scratch: Path) -> set[Path]:
    folders = (scratch, Path("/dev/shm"))
    return {path for folder in folders for pattern in LEFT_BEHIND for path in folder.glob(pattern)}


@pytest.fixture
async def cluster(model: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A coordinator; the tests start its workers. Temporary files have a folder of their own: others run beside it."""
    options = ["--dtype", "float32", "--context-tokens", "512", "--max-step-tokens", str(CHUNK)]
    options += ["--kv-memory-bytes", "30000000", "--heartbeat", "0.1", "--lease", "5"]
    # A short name: it is part of those of sockets.
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        scratch = Path(name)
        setup = Cluster(
            tmp_path,
            model=model,
            engine="vllm",
            prefill=0,
            decode=0,
            worker_options=options,
            coordinator_options=["--no-worker-wait", "120", "--admission", "off"],
            environment={"TMPDIR": name},
        )
        before = leftovers(scratch)
        async with running(setup) as cluster:
            yield cluster
        assert leftovers(scratch) <= before


def ranks_of(cluster: Cluster, name: str) -> list[psutil.Process]:
    """vLLM's engine core, and its ranks if they are processes of their own."""
    children = psutil.Process(cluster.members[name].process.pid).children(recursive=True)
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


async def assert_answers(cluster: Cluster, text_tokens: list[int], reference: Reference) -> None:
    """At the borders of blocks and chunks, once more with what is cached by then, and with seeds."""
    prompts = {length: text_tokens[length : 2 * length] for length in (1, 31, 32, 33, 64, 65, 97, 130)}
    prompts[95] = prompts[130][:BLOCK] + text_tokens[: 95 - BLOCK]
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        for _ in range(2):
            for length, prompt in prompts.items():
                answer = await client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS)
                assert list(answer.token_ids) == reference.greedy(prompt, MAX_TOKENS), length
                assert answer.timings.transfer_bytes > 0
        seeded = [
            await client.generate(text_tokens[:150], temperature=0.9, seed=4, max_tokens=8, logprobs=1)
            for _ in range(2)
        ]
        assert seeded[0].token_ids == seeded[1].token_ids
        side_by_side = await asyncio.gather(
            *(client.generate(prompt, max_tokens=MAX_TOKENS) for prompt in prompts.values())
        )
        assert all(answer.token_ids for answer in side_by_side)
        long = (text_tokens[n : n + 400] for n in count())
        leaving = await prompts_under_way(cluster, client, long, 4, max_tokens=5)
        for reading in leaving:
            await reading.leave()
    await cluster.assert_no_leaks()


@pytest.mark.slow
@pytest.mark.parametrize("decode", [1, 2])
async def test_two_ranks_compute_prompts(
    cluster: Cluster, text_tokens: list[int], reference: Reference, decode: int
) -> None:
    cluster.add_worker("prefill", "prefill-0", TWO_RANKS)
    cluster.add_worker("decode", "decode-0", *([TWO_RANKS] if decode == 2 else []))
    await cluster.wait_ready(prefill=1, decode=1)
    await assert_answers(cluster, text_tokens, reference)


@pytest.mark.slow
async def test_prompts_are_computed_in_two_stages(
    cluster: Cluster, text_tokens: list[int], reference: Reference
) -> None:
    """Each stage of the prefill worker writes the KV of its own layers."""
    cluster.add_worker("prefill", "prefill-0", TWO_STAGES)
    cluster.add_worker("decode", "decode-0")
    await cluster.wait_ready(prefill=1, decode=1)
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        for length in (1, 33, 64, 130, 130):
            prompt = text_tokens[length : 2 * length]
            answer = await client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS)
            assert list(answer.token_ids) == reference.greedy(prompt, MAX_TOKENS), length
    await cluster.assert_no_leaks()


async def test_two_ranks_decode_and_one_that_is_killed_ends_its_worker(
    cluster: Cluster, text_tokens: list[int], reference: Reference
) -> None:
    """The stream goes on at a worker of one rank."""
    cluster.add_worker("prefill", "prefill-0")
    cluster.add_worker("decode", "decode-0", TWO_RANKS)
    await cluster.wait_ready(prefill=1, decode=1)
    ranks = ranks_of(cluster, "decode-0")
    assert len(ranks) == 3
    await assert_answers(cluster, text_tokens, reference)
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        reading = Reading(client, text_tokens[50:120], max_tokens=400, ignore_eos=True, temperature=0.0)
        await reading.got(5)
        ranks[-1].kill()
        cluster.add_worker("decode", "decode-1")
        answer = await reading.task
        assert list(answer.token_ids) == reference.greedy(reading.prompt, 400)
        assert answer.served_by.decode_worker == "decode-1"
        cluster.members["decode-0"].process.wait(timeout=60)
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    await cluster.assert_no_leaks()
