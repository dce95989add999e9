"""Load shifts from answers to prompts: the autoscaler gives a decode worker the prefill role, and starts none."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from tests.integration.scaling.test_autoscale import POLICY, POOL, Scaled, running
from tests.support.clients.patient import PatientClient
from tests.support.cluster.real_cluster import held_resources
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(180)

ONE_GPU = POOL | {"gpus_per_replica": 1}
THREE_GPUS: Mapping[str, object] = POLICY | {
    "gpu_budget": 3,
    "prefill": ONE_GPU | {"target_ms": 400},
    "decode": ONE_GPU | {"target_ms": 60},
}
"""One pool can only grow by what the other gives up."""


def actions(log: Path) -> Counter[str]:
    """What the autoscaler has done, by its log."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return Counter(line["action"] for line in lines if line.get("event") == "scaling.acted")


async def roles(client: AsyncClient) -> dict[str, str]:
    """The role of each worker, by its name."""
    info = await client.server_info(timeout_s=PATIENCE_S)
    return {worker.worker_id: worker.role for worker in info.workers}


async def test_a_decode_worker_takes_the_prefill_role_when_prompts_grow_long(tmp_path: Path) -> None:
    async with running(tmp_path, "--prefill", "1", "--decode", "2", policy=THREE_GPUS) as up:
        before = {child.pid for child in up.children()}
        async with up.traffic("light", 2, 16, 20), up.traffic("long prompts", 8, 600, 2):
            await up.until(lambda now: now["prefill"] == 2 and now["decode"] == 1)
        async with PatientClient(up.target) as client:
            moved = await roles(client)
            assert sorted(moved) == ["decode-0", "decode-1", "prefill-0"]
            assert Counter(moved.values()) == {"prefill": 2, "decode": 1}
            assert moved["prefill-0"] == "prefill"
        assert {child.pid for child in up.children()} == before, "the same processes"
        done = actions(tmp_path / "up.log")
        assert done["change_role"] == 1
        assert not done["start"]
        await check_it_serves(up)


async def check_it_serves(up: Scaled) -> None:
    """No request has failed, and at the end nothing is held anywhere."""
    async with up.traffic("after", 2, 40, 20):
        pass
    assert not up.failures
    assert min(up.done[kind] for kind in ("light", "long prompts", "after")) > 0
    deadline = time.monotonic() + PATIENCE_S
    async with PatientClient(up.target) as client:
        while held := held_resources(await client.server_info(timeout_s=PATIENCE_S)):
            assert time.monotonic() < deadline, held
            await asyncio.sleep(0.05)
