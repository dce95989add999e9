"""Two workers with cores of their own and real weights: a decode worker that rests, or whose streams are ahead of their
targets, lends its core to the prompts."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading
from tests.support.engine.cpu_kernels import have_kernels

CORES = sorted(os.sched_getaffinity(0))
LENGTHS = (200, 100, 333)
ANSWER = 4
TPOT_MS = 200.0
"""Far above a step, even on a busy machine."""
FITTED = 16
"""Decode steps after which the worker knows what one takes."""


def lent_steps(cluster: Cluster, name: str) -> float:
    port = cluster.members[name].wait_event("metrics.ready")["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    (family,) = (each for each in families if each.name == "splitserve_steps_with_lent_cores")
    return sum(sample.value for sample in family.samples if sample.labels.get("kind") == "prefill")


@pytest.mark.skipif(len(CORES) < 2, reason="one core has nobody to lend to")
@pytest.mark.skipif(not have_kernels(), reason="the machine cannot run the cpu kernels")
@pytest.mark.timeout(180)
async def test_answers_are_the_same_with_the_neighbour_s_core(
    log_dir: Path, tmp_path: Path, smollm2: str
) -> None:
    options = ["--dtype", "bfloat16", "--kv-memory-bytes", "60000000", "--no-prefix-cache"]
    options += ["--metrics-port", "0", "--core-exchange", str(tmp_path / "cores")]
    setup = Cluster(log_dir, model=smollm2, engine="torch", prefill=0, decode=0, worker_options=options)
    tokens = load_tokenizer(smollm2).encode(sentences(80, seed=4))
    prompts = [tokens[length : 2 * length] for length in LENGTHS]
    async with running(setup) as cluster:
        cluster.add_worker("prefill", "prefill-0", "--cpus", str(CORES[0]))
        cluster.add_worker("decode", "decode-0", "--cpus", str(CORES[1]))
        await cluster.wait_ready(prefill=1, decode=1)
        async with AsyncClient(cluster.target, timeout_s=120) as client:

            async def ask(prompt: list[int]) -> tuple[int, ...]:
                answer = await client.generate(prompt, temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
                assert answer.timings.transfer_bytes > 0
                return tuple(answer.token_ids)

            for prompt in prompts:  # the first of a size is captured, not replayed
                await ask(prompt)
            before = lent_steps(cluster, "prefill-0")
            lent = [await ask(prompt) for prompt in prompts]
            assert lent_steps(cluster, "prefill-0") > before
            # Beside a stream without a target the decode worker keeps its core.
            stream = Reading(client, tokens[:40], max_tokens=900, ignore_eos=True)
            await stream.got(2)
            before = lent_steps(cluster, "prefill-0")
            assert [await ask(prompt) for prompt in prompts] == lent
            await stream.leave()
            assert lent_steps(cluster, "prefill-0") == before
            # With a target it lends what it is ahead of that.
            stream = Reading(client, tokens[:40], max_tokens=900, ignore_eos=True, tpot_ms=TPOT_MS)
            await stream.got(2 * FITTED)
            assert [await ask(prompt) for prompt in prompts] == lent
            assert lent_steps(cluster, "prefill-0") > before
            times = stream.times
            await stream.leave()
            assert (times[-1] - times[0]) / (len(times) - 1) < TPOT_MS / 1e3
            assert await asyncio.gather(*map(ask, prompts)) == lent
            assert lent_steps(cluster, "decode-0") == 0
        await cluster.assert_no_leaks()
