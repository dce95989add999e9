"""Requests that come at a rate of their own, whatever becomes of them, and what did."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import psutil

from splitserve.client import AsyncClient, Completion
from splitserve.errors import SplitserveError
from tests.support.cluster.real_cluster import Cluster
from tests.support.cluster.streams import tokens

REPEATS = 3
"""How often a load is offered where times were missed. What a cluster does it does again; what the machine did beside
it, it does not."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One request. `leave_after` output tokens the client hangs up."""

    prompt: int
    output: int
    leave_after: int | None = None
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request; neither an answer nor an error: the client hung up."""

    shape: Shape
    answer: Completion | None = None
    error: SplitserveError | None = None

    @property
    def service(self) -> float:
        """As admission counts it."""
        return 0.0 if self.answer is None else self.shape.prompt + 2 * self.answer.usage.completion_tokens


@dataclass(frozen=True, slots=True)
class Traffic:
    """Outcomes of one stretch of traffic, in order of arrival."""

    outcomes: Sequence[Outcome]
    seconds: float
    """From the first arrival to the last end."""

    @property
    def answers(self) -> list[Completion]:
        return [one.answer for one in self.outcomes if one.answer is not None]

    @property
    def errors(self) -> list[SplitserveError]:
        return [one.error for one in self.outcomes if one.error is not None]

    def ttft_s(self, share: float) -> float:
        """A percentile of the time to the first token, as the coordinator saw it."""
        return percentile((answer.timings.ttft_ms / 1e3 for answer in self.answers), share)

    def tpot_s(self, share: float) -> float:
        """A percentile of the time per output token."""
        return percentile((answer.timings.tpot_ms / 1e3 for answer in self.answers), share)


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


async def offer(
    client: AsyncClient, per_s: float, seconds: float, shape: Callable[[int], Shape] | Shape, seed: int = 1
) -> Traffic:
    """Poisson arrivals for so long; returns when all have ended."""
    loop, pick = asyncio.get_running_loop(), random.Random(seed)
    began, due_s, number = loop.time(), 0.0, 0
    running: list[asyncio.Task[Outcome]] = []
    while (due_s := due_s + pick.expovariate(per_s)) < seconds:
        await asyncio.sleep(max(0.0, began + due_s - loop.time()))
        number += 1
        wanted = shape(number) if callable(shape) else shape
        running.append(asyncio.create_task(_one(client, wanted, seed * 1_000_000 + number)))
    outcomes = await asyncio.gather(*running)
    return Traffic(outcomes, loop.time() - began)


async def _one(client: AsyncClient, shape: Shape, seed: int) -> Outcome:
    prompt, count = tokens(shape.prompt, seed), 0
    options = {"max_tokens": shape.output, "ignore_eos": True, "timeout_s": shape.timeout_s}
    try:
        async with aclosing(client.stream(prompt, **options)) as items:  # type: ignore[arg-type]
            async for item in items:
                if isinstance(item, Completion):
                    return Outcome(shape, answer=item)
                count += len(item.token_ids)
                if shape.leave_after is not None and count >= shape.leave_after:
                    return Outcome(shape)
    except SplitserveError as error:
        return Outcome(shape, error=error)
    raise AssertionError("the stream ended without its last message")


def process_of(cluster: Cluster, name: str = "coordinator") -> psutil.Process:
    """A member's process."""
    return psutil.Process(cluster.members[name].process.pid)


def rss_mb(cluster: Cluster, name: str = "coordinator") -> float:
    """Its resident memory, in 10^6 bytes."""
    return float(process_of(cluster, name).memory_info().rss) / 1e6
