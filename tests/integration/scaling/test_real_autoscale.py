"""`splitserve up --autoscale` with SmolLM2: load brings a second prefill worker, which goes again after it.

Every answer is `transformers`' own, whichever worker computed its prompt, and no request fails.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.errors import DeadlineExceededError
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.patient import PatientClient
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import held_resources
from tests.support.engine.reference import Reference
from tests.support.scaling.scaled_up import ScaledUp, scaled_up

SCALE_S = 150.0
"""A worker that starts beside a busy one on a busy machine."""
POLL_S = 0.05
LONG_PROMPTS = range(3)
SHORT_PROMPT = 3
LENGTHS = (250, 230, 210, 4)
MAX_TOKENS = (4, 4, 4, 12)
"""By prompt. The short one keeps decode busy and prefill idle, however fast the machine computes."""

SLO = {
    "window_s": 2,
    "history_s": 5,
    "settle_s": 2,
    "trim_after_s": 600,
    "min_samples": 1,  # the pool shrinks while a slow machine answers a request in seconds
}
POOL = {
    "min_replicas": 1,
    "gpus_per_replica": 0,
    "drain_s": 30,
    "cold_start_s": 5,
    "start_deadline_cold_starts": 25,  # a busy machine
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 2}},
    "slo": SLO,
}
POLICY = {
    "interval_s": 0.25,
    "prefill": POOL | {"max_replicas": 2, "target_ms": 1000},
    "decode": POOL | {"max_replicas": 1, "target_ms": 5000},
}
SETTINGS = {
    "engine": {"dtype": "float32", "threads": 1, "num_blocks": 512, "prefix_cache": False},
    "autoscale_window_s": 5.0,
    # On a busy machine forecasts are high, and no request is to be refused here.
    "coordinator": {"drain_s": 5.0, "heartbeat_timeout_s": 60.0, "admission": {"max_queue_s": 600.0}},
}

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]


@dataclass
class Scaled(ScaledUp):
    """A running `up --autoscale` and what its answers were."""

    prompts: Sequence[list[int]]
    answers: list[tuple[int, list[int]]] = field(default_factory=list)
    served_by: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answers by prefill worker and prompt."""

    async def ask(self, client: AsyncClient, number: int) -> None:
        """Asks one prompt and notes the answer."""
        answer = await client.generate(
            self.prompts[number], temperature=0.0, max_tokens=MAX_TOKENS[number], ignore_eos=True
        )
        self.answers.append((number, list(answer.token_ids)))
        self.served_by[answer.served_by.prefill_worker, number] += 1

    async def ask_once(self, prompts: Sequence[int]) -> None:
        """Asks each of the prompts, one after the other."""
        async with PatientClient(self.target, timeout_s=SCALE_S) as client:
            for number in prompts:
                await self.ask(client, number)

    @asynccontextmanager
    async def traffic(self, clients: int, prompts: Sequence[int]) -> AsyncIterator[None]:
        """So many clients that ask again as soon as they are answered. At the end every answer is awaited."""
        stop = asyncio.Event()

        async def ask(client: AsyncClient, turn: int) -> None:
            while not stop.is_set():
                await self.ask(client, prompts[turn % len(prompts)])
                turn += 1

        async with PatientClient(self.target, timeout_s=SCALE_S) as client, asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(ask(client, number))
            try:
                yield
            finally:
                stop.set()


async def until(holds: Callable[[AsyncClient], Awaitable[bool]], up: Scaled, what: str) -> None:
    """Polls until it holds."""
    deadline = time.monotonic() + SCALE_S
    async with PatientClient(up.target) as client:
        while True:
            try:
                if await holds(client):
                    return
            except DeadlineExceededError:  # a busy machine
                pass
            assert time.monotonic() < deadline, f"not within {SCALE_S} s: {what}; {up.served_by}"
            await asyncio.sleep(POLL_S)


@pytest.fixture(scope="module")
def prompts(smollm2: str) -> list[list[int]]:
    tokenizer = load_tokenizer(smollm2)
    return [tokenizer.encode(sentences(60, seed))[:length] for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(smollm2: str, prompts: list[list[int]]) -> list[list[int]]:
    reference = Reference(smollm2)
    return [reference.greedy(prompt, count) for prompt, count in zip(prompts, MAX_TOKENS, strict=True)]


async def test_load_brings_a_second_worker_and_answers_stay_right(
    prompts: list[list[int]], expected: list[list[int]], log_dir: Path
) -> None:
    async with scaled_up(log_dir, POLICY, SETTINGS) as started:
        up = Scaled(started.process, started.target, prompts)

        async def one(client: AsyncClient) -> bool:
            return list(await up.serving(client, "prefill")) == ["prefill-0"]

        async def both_answered(client: AsyncClient) -> bool:
            return (
                len(await up.serving(client, "prefill")) == 2
                and len({worker for worker, _ in up.served_by}) > 1
            )

        async def one_again(client: AsyncClient) -> bool:
            return len(await up.serving(client, "prefill")) == 1

        async def ended(_client: AsyncClient) -> bool:
            return len(up.children()) == 3

        async def settled(client: AsyncClient) -> bool:
            return not held_resources(await client.server_info())

        await until(one, up, "one of each")
        # Rates are known from long prompts, too, before they are needed.
        await up.ask_once([*LONG_PROMPTS, SHORT_PROMPT])
        # Light load throughout: the removal happens under it.
        async with up.traffic(1, [SHORT_PROMPT]):
            async with up.traffic(8, LONG_PROMPTS):
                await until(both_answered, up, "both prefill workers answer")
            await until(one_again, up, "one is given up")
            await until(ended, up, "its process has ended")
        assert {number for number, _ in up.answers} == {SHORT_PROMPT, *LONG_PROMPTS}
        wrong = [(number, tokens) for number, tokens in up.answers if tokens != expected[number]]
        assert not wrong
        await until(settled, up, "nothing is leaked")
