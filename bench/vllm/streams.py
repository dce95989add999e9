"""One turn of one system: streams that begin together, and what happens while all of them decode."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from typing_extensions import override

from bench.asking import random_prompt
from bench.goodput.wire import Chunk, NotServed, ask, completion_body, parsed
from bench.vllm.systems import System

PROMPT_TOKENS = 16
RETRY_S = 0.05
WAKE_S = 60.0
"""A system that has stood still answers again within this."""
WAKE_TOKENS = 4
NO_TARGETS = (0.0, 0.0)


@dataclass(frozen=True)
class Look:
    """CPU times of a system's parts, and when they were read on the loop's clock."""

    at_s: float
    cpu_s: Mapping[str, float]


@dataclass(frozen=True)
class Stream:
    """The events of one answer, which has `tokens` tokens."""

    event_s: Sequence[float]
    tokens: int

    @property
    def tokens_per_event(self) -> float:
        """A server may put several tokens into an event; all events count as equally many."""
        return self.tokens / len(self.event_s)


@dataclass(frozen=True)
class DecodeTurn:
    """What one system did while all streams decoded. `cpu_us`: microseconds a token, by part."""

    tpot_ms: float
    tokens_per_s: float
    cpu_us: Mapping[str, float]


class KeptChunks(list[Chunk]):
    """The chunks of an answer; `began` is set with the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.began = asyncio.Event()

    @override
    def append(self, chunk: Chunk, /) -> None:
        super().append(chunk)
        self.began.set()


def turn_of(streams: Sequence[Stream], first: Look, last: Look) -> DecodeTurn:
    """The figures between two looks. Raises RuntimeError where some stream had no two events between them."""
    tokens, tpots_s = 0.0, []
    for stream in streams:
        times = [at_s for at_s in stream.event_s if first.at_s <= at_s <= last.at_s]
        if len(times) < 2:
            raise RuntimeError("the first answer ended when the last had hardly begun: ask for more tokens")
        tokens += len(times) * stream.tokens_per_event
        tpots_s.append((times[-1] - times[0]) / ((len(times) - 1) * stream.tokens_per_event))
    cpu_us = {part: (last.cpu_s[part] - spent_s) / tokens * 1e6 for part, spent_s in first.cpu_s.items()}
    return DecodeTurn(median(tpots_s) * 1e3, tokens / (last.at_s - first.at_s), cpu_us)


async def run_turn(
    system: System, prompts: Sequence[Sequence[int]], output_tokens: int, temperature: float
) -> DecodeTurn:
    """All prompts at once. The system must be awake. Raises RuntimeError for an answer that is not complete."""
    loop = asyncio.get_running_loop()
    chunks = [KeptChunks() for _ in prompts]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(ask(system.at, body_of(system, prompt, output_tokens, temperature), kept))
            for prompt, kept in zip(prompts, chunks, strict=True)
        ]
        for kept in chunks:
            await kept.began.wait()
        first = Look(loop.time(), system.cpu_s())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        last = Look(loop.time(), system.cpu_s())
    answers = [parsed(kept) for kept in chunks]
    for answer in answers:
        if answer.error or answer.tokens != output_tokens:
            raise RuntimeError(f"{system.name}: {answer.tokens} of {output_tokens} tokens {answer.error}")
    return turn_of([Stream(answer.event_s, answer.tokens) for answer in answers], first, last)


def body_of(system: System, prompt: Sequence[int], output_tokens: int, temperature: float) -> dict[str, Any]:
    """The request for one stream."""
    return completion_body(system.at, prompt, output_tokens, NO_TARGETS) | {"temperature": temperature}


async def wake(system: System, numbers: random.Random) -> None:
    """Lets a system go on, and returns when it has answered. Raises TimeoutError."""
    system.server.resume()
    async with asyncio.timeout(WAKE_S):
        while True:
            chunks: list[Chunk] = []
            body = body_of(system, random_prompt(numbers, PROMPT_TOKENS), WAKE_TOKENS, 0.0)
            # Its parts may not have heard of each other yet.
            with suppress(NotServed, OSError, EOFError):
                await ask(system.at, body, chunks)
                if parsed(chunks).tokens == WAKE_TOKENS:
                    return
            await asyncio.sleep(RETRY_S)
