"""The second turn of a conversation on real workers, as its client sees it: TTFT by where the history lies.

A prefill and a decode worker with tiers below their KV blocks, behind a coordinator as it is by default. A
conversation's first turn is a prompt and its answer. The second turn's prompt is both and a few new tokens: once at
once, while the blocks of the first are in the pools; once after other prompts as long as the pools; and once on workers
that have been started anew over the same folder. Each is compared with a prompt of the same length that nobody has
computed.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

from bench.asking import AskedAnswer, ask, random_prompt
from bench.cluster import running_cluster
from bench.kv_tiers.trace_replay import FRONT, PATIENT, block_bytes
from splitserve.config.cluster import ClusterConfig
from splitserve.config.engine import EngineConfig
from splitserve.generation.kv_blocks import blocks_for

Place = Literal["pool", "host", "disk"]
BLOCK = 16
ANSWER_TOKENS = 32
TAIL_TOKENS = 16
"""New in the second turn."""
BAR = 0.25
"""TTFT of a second turn with 2,000 tokens of history, of computing its prompt: at most."""
FILLING = 6
"""Prompts as long as the history: three pools, so that either worker has had enough of them."""
PROMPTS = FILLING + 4
"""Of each conversation, its own included."""
SETTLE_S = 2.0
"""After this the workers have copied what they have computed, and their reports have come."""


@dataclass(frozen=True)
class SecondTurn:
    """A second turn, and a prompt of its length that was computed next to it."""

    place: Place
    ttft_s: float
    computed_s: float
    cached_tokens: int
    """Of the prompt, as the workers say."""


@dataclass(frozen=True)
class SecondTurnRow:
    """Medians over the conversations with so many tokens of history in one place; the ratio is the median of each
    one's own. `found`: the least share of a history that was not computed. `holds`: found, and within the bar."""

    place: Place
    history_tokens: int
    conversations: int
    found: float
    computed_ttft_ms: float
    ttft_ms: float
    of_computed: float
    holds: bool


Ask = Callable[[Sequence[int], int], Awaitable[AskedAnswer]]
"""A prompt, and how many tokens its answer shall have."""


def row_of(place: Place, history_tokens: int, turns: Sequence[SecondTurn]) -> SecondTurnRow:
    """The row of at least one second turn, all of one place and length."""
    # What was answered is at the decode worker alone, and the last block may not be full.
    reachable = history_tokens - ANSWER_TOKENS - BLOCK
    found = min(turn.cached_tokens for turn in turns) / history_tokens
    ratio = median(turn.ttft_s / turn.computed_s for turn in turns)
    return SecondTurnRow(
        place,
        history_tokens,
        len(turns),
        round(found, 3),
        round(1e3 * median(turn.computed_s for turn in turns), 1),
        round(1e3 * median(turn.ttft_s for turn in turns), 1),
        round(ratio, 3),
        found >= reachable / history_tokens and ratio <= BAR,
    )


def pool_blocks(history_tokens: int) -> int:
    """KV blocks of a worker: a conversation's, and another prompt of its length beside it."""
    return 2 * (blocks_for(history_tokens + TAIL_TOKENS, BLOCK) + 2)


class Conversation:
    """One conversation of random tokens, whose second turn can be asked again and again with another new end."""

    def __init__(self, ask: Ask, dice: random.Random, history_tokens: int) -> None:
        self._ask, self._dice, self._tokens = ask, dice, history_tokens
        self._history: list[int] = []

    async def first_turn(self) -> None:
        """Has the history computed."""
        prompt = random_prompt(self._dice, self._tokens - ANSWER_TOKENS)
        answer = await self._ask(prompt, ANSWER_TOKENS)
        self._history = [*prompt, *answer.token_ids]

    async def second_turn(self, place: Place, ask: Ask | None = None) -> SecondTurn:
        """Asks it, and computes a prompt as long after it."""
        asking = ask or self._ask
        length = len(self._history) + TAIL_TOKENS
        answer = await asking([*self._history, *random_prompt(self._dice, TAIL_TOKENS)], 2)
        computed = await asking(random_prompt(self._dice, length), 2)
        return SecondTurn(place, answer.ttft_s, computed.ttft_s, answer.cached_tokens)


async def fill_pools(ask: Ask, dice: random.Random, history_tokens: int) -> None:
    """Computes other prompts until nothing of before can be in a pool, whichever worker computes them."""
    for _ in range(FILLING):
        await ask(random_prompt(dice, history_tokens), 2)


async def second_turn_rows(model: str, dtype: str, lengths: Iterable[int], turns: int) -> list[SecondTurnRow]:
    """Rows of each length for pool, host memory and disk, after one conversation that warms up and does not count."""
    rows = []
    for tokens in lengths:
        with tempfile.TemporaryDirectory() as folder:
            config = _config(model, dtype, tokens, turns, Path(folder))
            rows += await _rows_of_length(config, tokens, turns)
    return rows


async def _rows_of_length(config: ClusterConfig, tokens: int, turns: int) -> list[SecondTurnRow]:
    dice, kept = random.Random(tokens), []
    taken: dict[Place, list[SecondTurn]] = {"pool": [], "host": [], "disk": []}
    async with running_cluster(config, {FRONT: PATIENT}, lambda _event: None) as cluster:
        asking = partial(ask, cluster.clients[FRONT])
        for _ in range(turns + 1):
            conversation = Conversation(asking, dice, tokens)
            await conversation.first_turn()
            await asyncio.sleep(SETTLE_S)
            taken["pool"].append(await conversation.second_turn("pool"))
            await asyncio.sleep(SETTLE_S)
            await fill_pools(asking, dice, tokens)
            await asyncio.sleep(SETTLE_S)
            taken["host"].append(await conversation.second_turn("host"))
            kept.append(conversation)
        await asyncio.sleep(SETTLE_S)
    async with running_cluster(config, {FRONT: PATIENT}, lambda _event: None) as cluster:
        asking = partial(ask, cluster.clients[FRONT])
        await fill_pools(asking, dice, tokens)  # every kind of step has been computed
        for conversation in kept:
            await asyncio.sleep(SETTLE_S)
            taken["disk"].append(await conversation.second_turn("disk", asking))
    return [row_of(place, tokens, each[1:]) for place, each in taken.items()]


def _config(model: str, dtype: str, tokens: int, turns: int, folder: Path) -> ClusterConfig:
    blocks = pool_blocks(tokens)
    one = blocks * block_bytes(model) * (2 if dtype == "float32" else 1)
    engine = EngineConfig.model_validate(
        {
            "dtype": dtype,
            "num_blocks": blocks,
            "kv_host_tier_bytes": PROMPTS * one,
            "kv_disk_tier_path": folder,
            "kv_disk_tier_bytes": (turns + 2) * PROMPTS * one,
        }
    )
    return ClusterConfig(model=model, engine=engine)
