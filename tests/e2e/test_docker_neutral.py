"""The example `compose/neutral` on a real Docker Engine: neutral workers are started, change sides and are stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from splitserve.client import AsyncClient
from splitserve.cluster.process_specs import SERVING_STATES
from tests.support.cluster.streams import tokens
from tests.support.scaling.compose import FOLDER, Compose, simulated_stack

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

SCALE_S = 90.0
ENGINE = "--num-blocks 4096 --threads 1"


def write(policy: Path, prefill: int, decode: int) -> None:
    """In place, for the container sees this very file."""
    pool = {"kind": "schedule", "gpus_per_replica": 0, "drain_s": 20, "max_replicas": 2}
    given = {"workers": "neutral", "interval_s": 0.5}
    given["prefill"] = pool | {"min_replicas": prefill}
    given["decode"] = pool | {"min_replicas": decode}
    policy.write_text(yaml.safe_dump(given))
    policy.chmod(0o644)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "policy.yaml"
    write(path, 1, 1)
    return path


@pytest.fixture(scope="module")
async def stack(policy: Path) -> AsyncIterator[Compose]:
    lines = (FOLDER / "neutral" / "neutral.env").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    async with simulated_stack("splitserve-neutral", policy, ENGINE, example) as stack:
        yield stack


async def sides(client: AsyncClient) -> dict[str, str]:
    """Where the workers that serve lean."""
    serving = [w for w in (await client.server_info()).workers if w.state in SERVING_STATES]
    assert all(worker.neutral for worker in serving)
    return {worker.worker_id: worker.pool for worker in serving}


async def until(client: AsyncClient, prefill: int, decode: int) -> dict[str, str]:
    """Waits until so many lean to each side."""
    wanted = ["decode"] * decode + ["prefill"] * prefill
    deadline = time.monotonic() + SCALE_S
    while sorted((now := await sides(client)).values()) != wanted:
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.2)
    return now


async def test_neutral_workers_follow_the_policy(stack: Compose, policy: Path) -> None:
    async with stack.client() as client:
        two = await until(client, 1, 1)
        write(policy, 1, 2)
        three = await until(client, 1, 2)
        assert set(two) < set(three)
        there = stack.containers("prefill") | stack.containers("decode")
        write(policy, 2, 1)
        assert set(await until(client, 2, 1)) == set(three), "one changed sides"
        assert stack.containers("prefill") | stack.containers("decode") == there, "and nothing was started"
        assert len((await client.generate(tokens(8, 1), max_tokens=4)).token_ids) == 4
        write(policy, 1, 1)
        assert set(await until(client, 1, 1)) < set(three)
