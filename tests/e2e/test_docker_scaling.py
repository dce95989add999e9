"""The compose file on a real Docker Engine, with simulated engines: each pool follows its own load, and none fails."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import yaml

from splitserve.client import AsyncClient
from tests.support.cluster.streams import tokens
from tests.support.scaling.compose import Compose, simulated_stack

SCALE_S = 90.0
POLL_S = 0.2
pytestmark = [pytest.mark.docker, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

POOL = {
    "min_replicas": 1,
    "max_replicas": 2,
    "gpus_per_replica": 0,
    "drain_s": 20,
    "cold_start_s": 5,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 3}},
    "slo": {"window_s": 2, "history_s": 5, "settle_s": 2, "trim_after_s": 600},
}
POLICY = {
    "interval_s": 0.5,
    "prefill": POOL | {"target_ms": 400},
    # Far above a light batch's step, beside a worker that starts on the same cores too.
    "decode": POOL | {"target_ms": 60},
}
ENGINE = (
    "--no-prefix-cache --num-blocks 4096 --threads 1 --simulated-prefill-token-s 0.0005 "
    "--simulated-step-s 0.004 --simulated-sequence-s 0.002"
)


class Traffic:
    """Clients of a stack, and what became of their requests."""

    def __init__(self, stack: Compose) -> None:
        self._stack = stack
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []

    @asynccontextmanager
    async def of(self, kind: str, clients: int, prompt: int, output: int) -> AsyncIterator[None]:
        """So many clients that ask again as soon as they are answered. At the end every answer is awaited."""
        stop = asyncio.Event()
        async with self._stack.client() as client, asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._ask(client, kind, number, prompt, output, stop))
            try:
                yield
            finally:
                stop.set()

    async def _ask(
        self, client: AsyncClient, kind: str, seed: int, prompt: int, output: int, stop: asyncio.Event
    ) -> None:
        while not stop.is_set():
            try:
                answer = await client.generate(tokens(prompt, seed), max_tokens=output)
            except Exception as error:
                self.failures.append(f"{kind}: {error!r}")
                return
            assert len(answer.token_ids) == output
            self.done[kind] += 1
            seed += 1000


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Compose]:
    policy = tmp_path_factory.mktemp("policy") / "policy.yaml"
    policy.write_text(yaml.safe_dump(POLICY))
    policy.chmod(0o644)
    async with simulated_stack("splitserve-e2e", policy, ENGINE) as stack:
        yield stack


async def until(stack: Compose, holds: Callable[[Counter[str]], bool]) -> Counter[str]:
    """Waits until it holds of the serving workers; the most of each pool that were seen meanwhile."""
    most: Counter[str] = Counter()
    deadline = time.monotonic() + SCALE_S
    while True:
        now = await stack.serving()
        most |= now
        if holds(now):
            return most
        assert time.monotonic() < deadline, (now, stack.containers(pool=None), await last_decisions(stack))
        await asyncio.sleep(POLL_S)


async def last_decisions(stack: Compose) -> str:
    return await stack.run("logs", "--no-color", "--tail", "30", "autoscaler")


async def one_each(stack: Compose) -> None:
    """Waits for one replica in each pool, and no container beside it."""
    await until(stack, lambda now: now["prefill"] == now["decode"] == 1)
    deadline = time.monotonic() + SCALE_S
    while (there := [stack.containers(pool) for pool in ("prefill", "decode")]) and any(
        list(pool.values()) != ["running"] for pool in there
    ):
        assert time.monotonic() < deadline, (there, await last_decisions(stack))
        await asyncio.sleep(POLL_S)


async def test_kv_goes_through_memory_between_containers(stack: Compose) -> None:
    lanes = [lane for worker in (await stack.info()).workers for lane in worker.lanes]
    assert [(lane.lane, lane.problem) for lane in lanes] == [("local", "")]


async def test_each_pool_follows_its_own_load(stack: Compose) -> None:
    traffic = Traffic(stack)
    await one_each(stack)
    # Light load throughout: every removal happens under it.
    async with traffic.of("light", 2, 16, 20):
        async with traffic.of("long prompts", 8, 600, 2):
            most = await until(stack, lambda now: now["prefill"] == 2)
            # Compose and Docker's DNS see what the autoscaler added.
            assert len((await stack.run("ps", "-q", "prefill")).split()) == 2
            assert len(stack.addresses("prefill")) == 2
        assert most["decode"] == 1, await last_decisions(stack)
        await one_each(stack)
        async with traffic.of("long outputs", 40, 8, 120):
            most = await until(stack, lambda now: now["decode"] == 2)
        assert most["prefill"] == 1, await last_decisions(stack)
        await one_each(stack)
    assert not traffic.failures
    assert min(traffic.done[kind] for kind in ("light", "long prompts", "long outputs")) > 0


async def test_a_killed_replica_is_replaced(stack: Compose) -> None:
    await one_each(stack)
    (victim,) = stack.containers("decode")
    stack.docker.kill(victim)
    await until(stack, lambda now: now["decode"] == 0)
    await one_each(stack)
    assert victim not in stack.containers(pool=None)
    async with stack.client() as client:
        assert len((await client.generate(tokens(8, 1), max_tokens=4)).token_ids) == 4


async def test_an_autoscaler_restarted_in_the_middle_goes_on(stack: Compose) -> None:
    traffic = Traffic(stack)
    await one_each(stack)
    autoscaler = stack.container("autoscaler")
    async with traffic.of("light", 2, 16, 20):
        async with traffic.of("long prompts", 8, 600, 2):
            await ordered(stack, lambda there: len(there) == 2)
            restart(stack, autoscaler)
            await until(stack, lambda now: now["prefill"] == 2)
            assert len(stack.containers("prefill")) == 2
        await ordered(stack, lambda there: any("draining" in name for name in there))
        restart(stack, autoscaler)
        await one_each(stack)
    assert not traffic.failures


def restart(stack: Compose, container: str) -> None:
    """Without any chance to tidy up."""
    stack.docker.kill(container)
    stack.docker.wait(container)
    stack.docker.start(container)


async def ordered(stack: Compose, holds: Callable[[dict[str, str]], bool]) -> None:
    """Waits until it holds of the prefill pool's containers."""
    deadline = time.monotonic() + SCALE_S
    while not holds(there := stack.containers("prefill")):
        assert time.monotonic() < deadline, (there, await last_decisions(stack))
        await asyncio.sleep(POLL_S / 4)


async def test_blocks_of_a_killed_prefill_replica_come_back_on_the_runtimes_word(stack: Compose) -> None:
    """Its name vanishes with it, so that nobody can refuse a connection; the tickets would hold blocks for 130 s. The
    long prompt may have had a second one started."""
    await one_each(stack)
    async with stack.client() as client:
        asking = asyncio.create_task(client.generate(tokens(8000, 1), max_tokens=2))
        await held(stack, lambda blocks: blocks > 0)
        for victim in [name for name, state in stack.containers("prefill").items() if state == "running"]:
            stack.docker.kill(victim)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        began_s = time.monotonic()
        await held(stack, lambda blocks: blocks == 0)
        assert time.monotonic() - began_s < SCALE_S / 2
        await until(stack, lambda now: now["prefill"] >= 1)
        assert len((await client.generate(tokens(8, 1), max_tokens=4)).token_ids) == 4


async def held(stack: Compose, holds: Callable[[int], bool]) -> None:
    """Waits until it holds of the decode pool's blocks that a writer may write."""
    deadline = time.monotonic() + SCALE_S
    while True:
        workers = [worker for worker in (await stack.info()).workers if worker.role == "decode"]
        if holds(sum(worker.reserved_blocks + worker.quarantined_blocks for worker in workers)):
            return
        assert time.monotonic() < deadline, workers
        await asyncio.sleep(POLL_S)
