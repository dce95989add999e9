"""Answers read in the background, so that a test can act at a certain token, and waiting for a cluster's state."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from itertools import count, islice
from typing import Any

from splitserve.client import AsyncClient, Completion
from splitserve.errors import DeadlineExceededError
from splitserve.v1 import inference_pb2
from tests.support.cluster.real_cluster import Cluster
from tests.support.waiting import PATIENCE_S

POLL_S = 0.02

Info = inference_pb2.GetServerInfoResponse


def tokens(length: int, seed: int) -> list[int]:
    """A prompt for simulated engines."""
    pick = random.Random(seed)
    return [pick.randrange(256) for _ in range(length)]


class Reading:
    """One answer. `tokens` and `times` (monotonic seconds) grow as it comes."""

    def __init__(self, client: AsyncClient, prompt: Sequence[int], **options: Any) -> None:
        self.prompt = list(prompt)
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, options))

    async def _read(self, client: AsyncClient, options: dict[str, Any]) -> Completion:
        try:
            async with aclosing(client.stream(self.prompt, **options)) as items:
                async for item in items:
                    if isinstance(item, Completion):
                        assert list(item.token_ids) == self.tokens
                        return item
                    self.tokens += item.token_ids
                    self.times += [time.monotonic()] * len(item.token_ids)
                    self._more.set()
            raise AssertionError("the stream ended without its last message")
        finally:
            self._more.set()

    async def got(self, count: int) -> None:
        """Waits until `count` tokens have come. Raises what ended the stream before."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.tokens) < count:
                if self.task.done():
                    self.task.result()
                    raise AssertionError(f"the answer ended after {len(self.tokens)} tokens")
                self._more.clear()
                await self._more.wait()

    async def leave(self) -> None:
        """The client goes away."""
        self.task.cancel()
        await asyncio.wait([self.task])

    def longest_gap_s(self) -> float:
        """Between two tokens that came one after the other."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def eventually(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Waits until `condition`, which looks at this process alone, holds."""
    deadline = time.monotonic() + timeout_s
    while True:
        if condition():
            return
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(POLL_S)


async def prompts_under_way(
    cluster: Cluster, client: AsyncClient, prompts: Iterable[Sequence[int]], at_once: int, **options: Any
) -> list[Reading]:
    """`at_once` answers, while worker prefill-0 computes one of their prompts. A short prompt may come and go between
    two reports of its worker; then the next ones are sent."""
    deadline, left = time.monotonic() + PATIENCE_S, iter(prompts)
    while time.monotonic() < deadline:
        readings = [Reading(client, prompt, **options) for prompt in islice(left, at_once)]
        while not all(reading.task.done() for reading in readings):
            with suppress(DeadlineExceededError):  # a busy machine
                if worker(await client.server_info(), "prefill-0").running_requests:
                    return readings
    raise AssertionError(f"not within {PATIENCE_S} s: a prompt is computed")


async def until(
    cluster: Cluster, condition: Callable[[Info], Any], what: str, timeout_s: float = PATIENCE_S
) -> Info:
    """Polls the coordinator until `condition` holds of its answer."""
    deadline, info = time.monotonic() + timeout_s, Info()
    async with AsyncClient(cluster.target) as client:
        while True:
            with suppress(DeadlineExceededError):  # a busy machine
                info = await client.server_info()
                if condition(info):
                    return info
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s: {what}\n{info}")
            await asyncio.sleep(POLL_S)


def worker(info: Info, name: str) -> inference_pb2.WorkerInfo:
    """The worker of that name; an empty one when it is not registered."""
    return next((w for w in info.workers if w.worker_id == name), inference_pb2.WorkerInfo())


def total(info: Info, pool: str, count: str) -> int:
    """Sum of one count over a pool."""
    return sum(getattr(w, count) for w in info.workers if w.role == pool)


async def decoding_worker(cluster: Cluster) -> str:
    """The first decode worker that is seen decoding."""
    info = await until(
        cluster, lambda info: total(info, "decode", "running_requests"), "a decode worker is busy"
    )
    return busy(info, "decode")


async def restarted(cluster: Cluster, name: str) -> None:
    """Kills a worker and starts it again; its new boot, which has another address, is ready."""
    before = worker(await until(cluster, lambda info: worker(info, name).address, "it is there"), name)
    cluster.members[name].kill()
    cluster.members[name].start()
    await until(
        cluster, lambda info: worker(info, name).address not in ("", before.address), "the new boot registers"
    )
    await cluster.wait_ready()


async def chunks_written(cluster: Cluster) -> Info:
    """Waits until a prompt is being computed and, if a chunk is quicker than a report, some of it was written."""
    info = await until(cluster, lambda info: total(info, "prefill", "running_requests"), "prefill begins")
    later = info.uptime_seconds + 0.3
    return await until(
        cluster,
        lambda info: info.uptime_seconds > later and total(info, "prefill", "running_requests"),
        "prefill goes on",
    )


async def mid_prompt(
    cluster: Cluster, ask: Callable[[int], Reading], pool: str = "prefill"
) -> tuple[Reading, Info]:
    """A request whose prompt is being computed by a worker of the pool, and of which some was written, see
    `chunks_written`.

    `ask(number)` makes another one where the prompt came and went while this process had no core."""
    deadline = time.monotonic() + PATIENCE_S
    async with AsyncClient(cluster.target) as client:
        for number in count():
            reading, since_s = ask(number), None
            while not reading.tokens and not reading.task.done():
                info = await client.server_info()
                if total(info, pool, "running_requests"):
                    since_s = info.uptime_seconds if since_s is None else since_s
                    if info.uptime_seconds > since_s + 0.3 and not reading.tokens:
                        return reading, info
                await asyncio.sleep(POLL_S)
            await reading.task
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: a prompt is computed"
    raise AssertionError("not reached")


def busy(info: Info, pool: str) -> str:
    """The first worker of a pool that computes or decodes something."""
    return next(w.worker_id for w in info.workers if w.role == pool and w.running_requests)


async def timed(work: Awaitable[Any]) -> float:
    """How many seconds it takes."""
    began = time.monotonic()
    await work
    return time.monotonic() - began
