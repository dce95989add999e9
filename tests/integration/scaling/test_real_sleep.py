"""SmolLM2 on cpu: workers give up the memory of their KV, take it back, and answer as before."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import psutil
import pytest

from splitserve.models.hf_tokenizer import load_tokenizer
from tests.integration.scaling.test_sleep import plan, state
from tests.support.clients.patient import PatientScalingClient
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import eventually
from tests.support.engine.reference import Reference
from tests.support.waiting import LEAST_TIMEOUT_S

BLOCKS, BLOCK_TOKENS = 256, 16
KV_BYTES = BLOCKS * BLOCK_TOKENS * 30 * 2 * 3 * 64 * 4
"""Of 30 layers, keys and values, 3 heads of 64 elements, in float32: 189 MB."""
MAX_TOKENS = 12

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LEAST_TIMEOUT_S)]


def kv_in_memory(pid: int) -> int:
    """Bytes of the process's KV that are in memory: of its mappings with huge pages, which in float32 only KV has."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text())
    huge = [each for each in mappings if re.search(r"(?m)^VmFlags:.* hg\b", each)]
    return sum(1024 * int(found[1]) for each in huge if (found := re.search(r"(?m)^Rss:\s+(\d+) kB", each)))


async def test_memory_falls_by_the_kv_and_the_tokens_stay(smollm2: str, log_dir: Path) -> None:
    tokenizer, reference = load_tokenizer(smollm2), Reference(smollm2)
    prompts = [tokenizer.encode(sentences(n // 6 + 8, seed=n))[:n] for n in (17, 32, 33)]
    expected = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    options = ["--dtype", "float32", "--num-blocks", str(BLOCKS), "--block-size", str(BLOCK_TOKENS)]
    cluster = Cluster(log_dir, model=smollm2, engine="torch", worker_options=options)
    names = ("prefill-0", "decode-0")
    async with running(cluster), cluster.client() as client, PatientScalingClient(cluster.target) as scaling:

        async def answers() -> list[list[int]]:
            asked = (client.generate(p, temperature=0.0, max_tokens=MAX_TOKENS) for p in prompts)
            return [list(answer.token_ids) for answer in await asyncio.gather(*asked)]

        assert await answers() == expected
        pids = [cluster.members[name].process.pid for name in names]
        await eventually(lambda: all(kv_in_memory(pid) >= KV_BYTES for pid in pids), "KV is populated")
        before = [psutil.Process(pid).memory_info().rss for pid in pids]
        await plan(scaling, asleep=names)
        await state(client, prefill_0="sleeping", decode_0="sleeping")
        after = [psutil.Process(pid).memory_info().rss for pid in pids]
        assert [kv_in_memory(pid) for pid in pids] == [0, 0]
        assert all(full - asleep >= 0.98 * KV_BYTES for full, asleep in zip(before, after, strict=True))
        await plan(scaling, active=names)
        await state(client, prefill_0="ready", decode_0="ready")
        # At once, while the memory is being populated again.
        assert await answers() == expected
        again = await client.generate(prompts[2], temperature=0.0, max_tokens=MAX_TOKENS)
        assert list(again.token_ids) == expected[2]
        assert again.usage.cached_prompt_tokens > 0, "the prefix cache works as before"
        await cluster.assert_no_leaks()
        woke = {w.worker_id: w.wake_seconds for w in (await client.server_info()).workers}
        print(f"woke up in {woke}")
        assert all(woke.values())
