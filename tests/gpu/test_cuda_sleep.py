"""Workers as real processes on one GPU: they hand KV over in its memory, sleep, wake up, and answer as before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from splitserve.client.scaling_client import ScalingClient
from tests.integration.scaling.test_sleep import plan, state
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import eventually
from tests.support.engine.runner_driver import prompt_of, reference
from tests.support.engine.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]
BLOCKS, BLOCK, TOKENS = 200_000, 16, 8
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 8 * 4
"""Two layers, keys and values, two heads of eight elements, in float32."""
NAMES = ("prefill-0", "decode-0")


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


async def test_a_pair_sleeps_and_answers_as_before(tmp_path: Path) -> None:
    folder, prompts = tmp_path / "tiny", [prompt_of(length) for length in (1, 15, 16, 17, 100)]
    expected = reference(folder, "llama", prompts, TOKENS)
    model = make_tiny_model("llama", folder)
    options = ["--dtype", "float32", "--device", "cuda", "--device-sleep", "on"]
    options += ["--num-blocks", str(BLOCKS), "--block-size", str(BLOCK)]
    cluster = Cluster(tmp_path, model=str(model), engine="torch", worker_options=options, fresh=True)
    async with running(cluster), cluster.client() as client, ScalingClient(cluster.target) as scaling:

        async def answers() -> list[list[int]]:
            asked = (client.generate(p, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for p in prompts)
            return [list(answer.token_ids) for answer in await asyncio.gather(*asked)]

        assert await answers() == expected
        before = used_bytes()
        for asleep in (NAMES[1:], NAMES, NAMES):
            await plan(scaling, asleep=asleep)
            await state(client, **{name.replace("-", "_"): "sleeping" for name in asleep})
            wanted = len(asleep) * BLOCKS * BLOCK_BYTES
            await eventually(
                lambda wanted=wanted: before - used_bytes() >= wanted, "the device has the memory again"
            )
            await plan(scaling, active=NAMES)
            await state(client, prefill_0="ready", decode_0="ready")
            assert await answers() == expected
        woke = {worker.worker_id: worker.wake_seconds for worker in (await client.server_info()).workers}
        print(f"woke up in {woke}")
        await cluster.assert_no_leaks()
