"""Prompts computed on the decode worker, by choice of the coordinator: same tokens, no handoff, nothing leaked."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.reference import Reference
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S

MAX_TOKENS = 8


@pytest.mark.parametrize(("mode", "local"), [("always", True), ("never", False)])
async def test_same_tokens_with_and_without_a_prefill_worker(log_dir: Path, mode: str, local: bool) -> None:
    prompt = [(11 * n) % 250 for n in range(300)]
    async with running(Cluster(log_dir, coordinator_options=["--local-prefill", mode])) as cluster:
        async with AsyncClient(cluster.target) as client:
            answer = await client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            again = await client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            single = await client.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
            (told,) = (await client.request_record(again.request_id)).attempts
        await cluster.assert_no_leaks()
    expected = expected_tokens(prompt, MAX_TOKENS)
    assert list(answer.token_ids) == list(again.token_ids) == expected
    assert list(single.token_ids) == expected[:1]
    assert (answer.served_by.prefill_worker == "") is local
    assert (answer.served_by.transport == "") is local
    assert (answer.timings.transfer_bytes == 0) is local
    assert answer.served_by.decode_worker == "decode-0"
    assert answer.timings.prefill_ms > 0
    assert again.usage.cached_prompt_tokens > 0, "whoever computed it"
    assert again.usage.decode_cached_tokens > 0
    assert told.prefill_worker == again.served_by.prefill_worker
    assert told.cached_tokens == again.usage.cached_prompt_tokens


async def test_auto_begins_split_and_turns_local_once_the_rates_are_measured(log_dir: Path) -> None:
    async with running(Cluster(log_dir, coordinator_options=["--local-prefill", "auto"])) as cluster:
        async with AsyncClient(cluster.target) as client, asyncio.timeout(PATIENCE_S):
            first = await client.generate([1] * 16, max_tokens=4, ignore_eos=True)
            for seed in itertools.count(2):
                answer = await client.generate([seed % 250] * 16, max_tokens=4, ignore_eos=True)
                if not answer.served_by.prefill_worker:
                    break
        await cluster.assert_no_leaks()
    assert first.served_by.prefill_worker == "prefill-0"
    assert list(answer.token_ids) == expected_tokens([seed % 250] * 16, 4)


async def test_same_tokens_where_targets_pace_local_prompts(log_dir: Path) -> None:
    """The second half of the requests comes while the first one decodes, on workers that have measured themselves."""
    options = ["--local-prefill", "always", "--tpot-slo", "0.2"]
    prompts = [[(seed * 31 + 7 * n) % 250 for n in range(40 * seed)] for seed in range(1, 9)]

    async def asked(client: AsyncClient, prompt: list[int]) -> tuple[int, ...]:
        answer = await client.generate(prompt, max_tokens=48, temperature=0.0, ignore_eos=True)
        return tuple(answer.token_ids)

    async with running(Cluster(log_dir, coordinator_options=options)) as cluster:
        async with AsyncClient(cluster.target) as client, asyncio.timeout(PATIENCE_S):
            for prompt in prompts:
                await asked(client, prompt)
            fresh = [[251 - token for token in prompt] for prompt in prompts]
            answers = await asyncio.gather(*(asked(client, prompt) for prompt in fresh))
        await cluster.assert_no_leaks()
    assert answers == [tuple(expected_tokens(prompt, 48)) for prompt in fresh]


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_prompts_with_a_target_go_to_the_worker_that_is_not_busy(log_dir: Path) -> None:
    """Two prompts at a time, of 2 s and of 0.2 s, are computed by different workers, and a short one alone by the
    decode worker, which hands nothing off, once the coordinator knows what prompts take."""
    options = ["--local-prefill", "auto", "--admission", "off", "--ttft-slo", "3", "--tpot-slo", "1"]
    engine = ["--simulated-prefill-token-s", "0.002", "--heartbeat", "0.1", "--no-prefix-cache"]
    greedy = {"max_tokens": 4, "ignore_eos": True, "temperature": 0.0}
    setup = Cluster(log_dir, worker_options=engine, coordinator_options=options)
    async with running(setup) as cluster:
        async with AsyncClient(cluster.target) as client, asyncio.timeout(PATIENCE_S):

            async def round_of(seed: int) -> bool:
                """Whether it was so."""
                tokens = [[seed] * 100, [seed + 50] * 1000, [seed + 100] * 100]
                alone = await client.generate(tokens[0], **greedy)
                began = asyncio.create_task(client.generate(tokens[1], **greedy))
                while not began.done():  # or it came and went while this process had no core
                    if any(worker.running_requests for worker in (await client.server_info()).workers):
                        break
                short = await client.generate(tokens[2], **greedy)
                long = await began
                for prompt, answer in zip(tokens, (alone, long, short), strict=True):
                    assert list(answer.token_ids) == expected_tokens(prompt, 4)
                split = {answer.served_by.prefill_worker for answer in (long, short)} == {"", "prefill-0"}
                return not alone.served_by.prefill_worker and split

            in_a_row = 0
            for seed in itertools.count():
                in_a_row = in_a_row + 1 if await round_of(seed % 50) else 0
                if in_a_row == 3:
                    break
        await cluster.assert_no_leaks()


async def test_the_pools_can_be_kept_apart(log_dir: Path) -> None:
    """Prompts at once that one worker alone cannot begin in time."""
    options = ["--local-prefill", "never", "--admission", "off", "--ttft-slo", "0.2", "--tpot-slo", "1"]
    engine = ["--simulated-prefill-token-s", "0.001", "--heartbeat", "0.1", "--no-prefix-cache"]
    async with running(Cluster(log_dir, worker_options=engine, coordinator_options=options)) as cluster:
        async with AsyncClient(cluster.target) as client:
            for seed in range(10):  # the workers measure what prompts take
                await client.generate([seed] * (40 + 40 * (seed % 3)), max_tokens=2)
            asked = (client.generate([100 + seed] * 200, max_tokens=4, ignore_eos=True) for seed in range(6))
            answers = await asyncio.gather(*asked)
        await cluster.assert_no_leaks()
    assert {answer.served_by.prefill_worker for answer in answers} == {"prefill-0"}


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_real_answers_do_not_depend_on_who_computes_the_prompt(
    log_dir: Path, short_smollm2: str
) -> None:
    """More and more prompts at once, until both workers have computed some of a round: how many that takes depends on
    the machine. Where steps are slow, only a wide TPOT target leaves the decode worker room for prompts."""
    options = ["--local-prefill", "auto", "--admission", "off", "--ttft-slo", "1", "--tpot-slo", "3"]
    engine = [
        "--dtype",
        "float32",
        "--kv-memory-bytes",
        "100000000",
        "--heartbeat",
        "0.1",
        "--no-prefix-cache",
    ]
    setup = Cluster(
        log_dir, model=short_smollm2, engine="torch", worker_options=engine, coordinator_options=options
    )
    tokens, reference = load_tokenizer(short_smollm2).encode(sentences(120, seed=8)), Reference(short_smollm2)
    prompts = [tokens[length : 2 * length] for length in (40, 160, 90, 200)]
    expected = [reference.greedy(prompt, 6) for prompt in prompts]
    async with running(setup) as cluster:
        async with AsyncClient(cluster.target, timeout_s=120) as client:

            async def ask(prompt: list[int], greedy: list[int]) -> bool:
                """Whether the prefill worker computed the prompt."""
                answer = await client.generate(prompt, max_tokens=6, temperature=0.0, ignore_eos=True)
                assert list(answer.token_ids) == greedy
                return bool(answer.served_by.prefill_worker)

            for times in itertools.count(1):
                asked = [ask(*pair) for _ in range(times) for pair in zip(prompts, expected, strict=True)]
                if set(await asyncio.gather(*asked)) == {True, False}:
                    break
        await cluster.assert_no_leaks()
