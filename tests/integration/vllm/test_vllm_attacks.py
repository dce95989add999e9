"""Workers of `--engine vllm` that should not be there, beside a pair that serves; SmolLM2 in float32."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import until, worker
from tests.support.engine.reference import Reference
from tests.support.waiting import PATIENCE_S

LANES, MAX_TOKENS = 8, 12
OPTIONS = ["--dtype", "float32", "--context-tokens", "256", "--max-step-tokens", "64", "--num-blocks", "20"]
OPTIONS += ["--no-prefix-cache", "--heartbeat", "0.1"]
WAIT = ["--no-worker-wait", "120", "--admission", "off"]
"""Requests wait for the worker that comes back, and for blocks at the worker: three have room."""

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_another_kind_is_refused_and_one_id_has_one_worker(smollm2: str, log_dir: Path) -> None:
    """Of two decode workers of one id the later one serves; it is killed while reservations wait for it."""
    text, reference = load_tokenizer(smollm2).encode(sentences(60, seed=5)), Reference(smollm2)
    prompts = [text[9 * n : 9 * n + 100 + n] for n in range(4)]
    right = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    over, setup = (
        asyncio.Event(),
        Cluster(log_dir, model=smollm2, engine="vllm", worker_options=OPTIONS, coordinator_options=WAIT),
    )
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=300) as client:

        async def ask(lane: int) -> None:
            while not over.is_set():
                answer = await client.generate(
                    prompts[lane % 4], max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
                )
                assert list(answer.token_ids) == right[lane % 4]

        first = worker(await client.server_info(), "decode-0").address
        async with asyncio.TaskGroup() as group:
            for lane in range(LANES):
                group.create_task(ask(lane))
            others = {"dtype": "bfloat16", "block-size": "64"}
            odd = {
                field: cluster.add_worker("decode", f"odd-{field}", f"--{field}", value)
                for field, value in others.items()
            }
            for field, member in odd.items():
                assert await asyncio.to_thread(member.process.wait, PATIENCE_S) != 0
                assert "KV layout differs" in member.log_tail()
                assert field.partition("-")[0] in member.log_tail()
                assert "Traceback" not in member.log_tail()
                del cluster.members[member.name]
            twin = cluster.add_worker("decode", "twin", "--worker-id", "decode-0")
            await until(
                cluster, lambda info: worker(info, "decode-0").address not in ("", first), "the later serves"
            )
            refused = await asyncio.to_thread(cluster.members["decode-0"].wait_event, "registry.refused")
            assert refused["reason"] == "WORKER_REPLACED"
            await until(cluster, lambda info: worker(info, "decode-0").waiting_reservations, "some wait")
            twin.kill()
            await until(cluster, lambda info: worker(info, "decode-0").address == first, "it is back")
            await client.generate(prompts[0], max_tokens=2)
            over.set()
        await cluster.assert_no_leaks()
