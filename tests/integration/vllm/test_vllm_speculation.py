"""Speculative decoding (n-gram) on workers of engine vllm: the tokens are those without it, and steps bring several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.core.engine import EngineRequest, StopParams
from engine.core.model_runner import SamplingParams
from splitserve.client import AsyncClient
from splitserve.config.engine import EngineConfig
from splitserve.errors import InvalidArgumentError
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.reference import Reference
from tests.support.engine.vllm_rig import VllmRig

SPECULATION = (
    '--speculative-config={"method":"ngram","num_speculative_tokens":3,'
    '"prompt_lookup_max":4,"prompt_lookup_min":2}'
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
async def cluster(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = ["--dtype", "float32", "--context-tokens", "512", f"--engine-args='{SPECULATION}'"]
    options += ["--kv-memory-bytes", "150000000", "--heartbeat", "0.1"]
    setup = Cluster(tmp_path_factory.mktemp("logs"), model=smollm2, engine="vllm", worker_options=options)
    async with running(setup) as cluster:
        yield cluster


@pytest.mark.slow
def test_the_tokens_of_a_step_are_put_out_one_after_the_other(smollm2: str) -> None:
    engine = EngineConfig(
        kind="vllm",
        dtype="float32",
        num_blocks=20,
        context_tokens=256,
        threads=1,
        engine_args=f"'{SPECULATION}'",
    )
    repeating = (load_tokenizer(smollm2).encode(sentences(3, seed=1))[:12] * 8)[:90]
    rig = VllmRig.of(smollm2, engine)
    try:
        greedy = SamplingParams(temperature=0.0)
        rig.core.add_request(EngineRequest("r", tuple(repeating), greedy, StopParams(48, ignore_eos=True)))
        rig.run()
        assert rig.tokens("r") == Reference(smollm2).greedy(repeating, 48)
        steps = sum(sum(total.batches) for total in rig.core.step_totals.values())
        assert steps < 36, "drafts are accepted"
        assert len(rig.outputs["r"]) > steps
        rig.assert_empty()
    finally:
        rig.close()


async def test_greedy_answers_are_those_without_speculation(cluster: Cluster, smollm2: str) -> None:
    """Also where the first token ends the answer, and where `max_tokens` ends it within a burst."""
    text = load_tokenizer(smollm2).encode(sentences(60, seed=7))
    repeating = (text[:12] * 8)[:90]
    cases = [(repeating, 1), (repeating, 2), (repeating, 40), (text[:70], 24), (text[7:40] * 3, 33)]
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        answers = await asyncio.gather(
            *(
                client.generate(prompt, temperature=0.0, max_tokens=most, ignore_eos=True, logprobs=1)
                for prompt, most in cases
            )
        )
    reference = Reference(smollm2)
    for (prompt, most), answer in zip(cases, answers, strict=True):
        assert list(answer.token_ids) == reference.greedy(prompt, most)
        assert len(answer.logprobs) == most
    await cluster.assert_no_leaks()


async def test_what_vllm_cannot_do_beside_speculation_is_refused_by_name(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        with pytest.raises(InvalidArgumentError, match="min_p"):
            await client.generate([1, 2, 3], max_tokens=4, temperature=0.8, min_p=0.1)
        answer = await client.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
    assert len(answer.token_ids) == 4
    await cluster.assert_no_leaks()
