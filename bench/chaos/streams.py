"""Streams whose every token is compared with the reference, offered at a rate."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from splitserve.client import AsyncClient, Completion
from splitserve.errors import SplitserveError
from splitserve.models.sources import resolve_model

MAX_TOKENS = 48
TIMEOUT_S = 180.0
LONG_GAP_S = 5.0
TEXT = "a story about the old river where seven boats carry salt and letters to people who wait for them"


@dataclass(frozen=True)
class Known:
    """A prompt's token ids and its greedy answer."""

    prompt: Sequence[int]
    answer: Sequence[int]
    max_tokens: int = MAX_TOKENS


def references(model: str, prompts: int, seed: int = 5, max_tokens: int = MAX_TOKENS) -> list[Known]:
    """Greedy answers of `transformers` in float32, of `max_tokens` at most, to so many prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # two threads that wait for each other take many times as long on a busy machine
    folder = resolve_model(model).path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pick, words, known = random.Random(seed), TEXT.split(), []
    for _ in range(prompts):
        text = " ".join(pick.choices(words, k=pick.randint(8, 60)))
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.inference_mode():
            output = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        answer = [int(token) for token in output[0, ids.shape[1] :]]
        known.append(Known(ids[0].tolist(), answer, max_tokens))
    return known


@dataclass
class StreamTally:
    """What became of the streams."""

    timeout_s: float = TIMEOUT_S
    """Deadline of a stream."""
    streams: int = 0
    completed: int = 0
    wrong_tokens: int = 0
    resumed: int = 0
    computed_by_decode: int = 0
    """Streams whose prompt was computed by the decode worker, in their last attempt."""
    longest_gap_s: float = 0.0
    """The longest time between two tokens of a stream."""
    longest_ttft_s: float = 0.0
    longest_s: float = 0.0
    """The longest time from a stream's begin to its regular end."""
    errors: Counter[str] = field(default_factory=Counter)

    def _add_gap(self, gap_s: float, position: int) -> None:
        """A pause between two tokens; a long one is told at once, to be found among the faults."""
        self.longest_gap_s = max(self.longest_gap_s, gap_s)
        if gap_s > LONG_GAP_S:
            print(f"a stream waited {gap_s:.1f} s for token {position}", file=sys.stderr)

    async def stream(self, client: AsyncClient, known: Known) -> None:
        """Runs a stream from beginning to end, and counts what became of it."""
        self.streams += 1
        began_s = last_s = time.monotonic()
        got = 0
        try:
            async with aclosing(
                client.stream(
                    known.prompt, temperature=0.0, max_tokens=known.max_tokens, timeout_s=self.timeout_s
                )
            ) as items:
                async for item in items:
                    if isinstance(item, Completion):
                        self.completed += 1
                        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                        self.wrong_tokens += list(item.token_ids) != list(known.answer)
                        self.resumed += item.served_by.attempts > 1
                        self.computed_by_decode += not item.served_by.prefill_worker
                        return
                    now_s = time.monotonic()
                    if got:
                        self._add_gap(now_s - last_s, got)
                    else:
                        self.longest_ttft_s = max(self.longest_ttft_s, now_s - began_s)
                    last_s = now_s
                    expected = known.answer[got : got + len(item.token_ids)]
                    self.wrong_tokens += sum(a != b for a, b in zip(item.token_ids, expected, strict=False))
                    self.wrong_tokens += max(0, len(item.token_ids) - len(expected))
                    got += len(item.token_ids)
        except SplitserveError as error:
            self.errors[f"{type(error).__name__} {error.reason}: {error.message}"[:200]] += 1
        else:
            self.errors["ended early"] += 1


async def capacity_per_s(target: str, known: Sequence[Known], at_once: int, seconds: float) -> float:
    """Streams completed a second when `at_once` clients ask again as soon as they are answered."""
    tally, end_s = StreamTally(), time.monotonic() + seconds

    async def ask(client: AsyncClient, number: int) -> None:
        while time.monotonic() < end_s:
            await tally.stream(client, known[number % len(known)])
            number += at_once

    began_s = time.monotonic()
    async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
        for number in range(at_once):
            group.create_task(ask(client, number))
    if tally.errors:
        raise RuntimeError(f"an undisturbed cluster refused: {tally.errors}")
    return tally.completed / (time.monotonic() - began_s)


async def offer(
    target: str, known: Sequence[Known], rate_per_s: float, stop: asyncio.Event, tally: StreamTally, seed: int
) -> None:
    """Starts streams at random moments, `rate_per_s` on average, until `stop`; returns when all have ended."""
    pick = random.Random(seed)
    async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
        while not stop.is_set():
            group.create_task(tally.stream(client, pick.choice(known)))
            await asyncio.sleep(pick.expovariate(rate_per_s))
