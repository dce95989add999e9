"""Part `handoff`: splitserve's pair and vLLM's push pair in turns, one request at a time, with the same prompts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

from rich.console import Console

from bench.asking import random_prompt
from bench.machine import OtherLoad
from bench.peers.vllm_pair import SETTLE_S, Times, VllmPairTurn, ask_splitserve, ask_vllm
from bench.peers.vllm_server import Layout, RunningPair, running_pair
from bench.server_process import HOST, RunningCluster, running_up
from bench.vllm.rows import PushHandoffRow, handoff_row
from bench.vllm.systems import OWN, own_settings
from splitserve.addresses import join_address
from splitserve.client import AsyncClient

MAX_TOKENS = 8
WARM_UP_TURNS = 2
Answer = tuple[Times, tuple[int, ...]]


async def handoff_rows(
    layout: Layout, lengths: Sequence[int], repeats: int, seed: int, tell: Console
) -> list[PushHandoffRow]:
    """Runs both pairs and measures every length; the first one of a pair of turns changes from repeat to repeat."""
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_up(own_settings(layout), OWN, layout.log_dir))
        cluster.server.pause()
        pair = await stack.enter_async_context(running_pair(layout))
        pair.pause()
        client = await stack.enter_async_context(AsyncClient(join_address(HOST, cluster.grpc_port)))
        systems = _Pairs(cluster, client, pair, random.Random(seed))
        rows = []
        for length in lengths:
            turns = [await systems.turn(length, number) for number in range(WARM_UP_TURNS + repeats)]
            rows.append(handoff_row(length, turns[WARM_UP_TURNS:]))
            tell.print(rows[-1])
        return rows


class _Pairs:
    """Both pairs, all standing still between turns."""

    def __init__(
        self, cluster: RunningCluster, client: AsyncClient, pair: RunningPair, numbers: random.Random
    ) -> None:
        self._cluster, self._client, self._pair, self._random = cluster, client, pair, numbers

    async def turn(self, length: int, number: int) -> VllmPairTurn:
        """One prompt through both."""
        prompt, load = random_prompt(self._random, length), OtherLoad()
        if number % 2:
            vllm, vllm_ids = await self._vllm(prompt)
            own, own_ids = await self._own(prompt)
        else:
            own, own_ids = await self._own(prompt)
            vllm, vllm_ids = await self._vllm(prompt)
        equal = sum(a == b for a, b in zip(own_ids, vllm_ids, strict=True)) / MAX_TOKENS
        return VllmPairTurn(own, vllm, equal, load.share())

    async def _own(self, prompt: Sequence[int]) -> Answer:
        self._cluster.server.resume()
        try:
            await self._client.wait_ready()
            await asyncio.sleep(SETTLE_S)
            return await ask_splitserve(self._client, prompt, MAX_TOKENS)
        finally:
            self._cluster.server.pause()

    async def _vllm(self, prompt: Sequence[int]) -> Answer:
        self._pair.resume()
        try:
            await asyncio.sleep(SETTLE_S)
            return await ask_vllm(self._pair.client, prompt, MAX_TOKENS)
        finally:
            await asyncio.sleep(SETTLE_S)
            self._pair.pause()
