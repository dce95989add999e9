"""Times to the first token with a real model, by where the prompt's prefix lies."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Literal

from bench.kv_tiers.conversations import Conversations
from engine.core.engine_core import EngineCore
from engine.core.model_runner import warm_up
from engine.core.types import EngineRequest, SamplingParams, StopParams
from engine.runner.torch_runner import build_torch_runner
from engine.tiers.build import make_tiers
from engine.tiers.kv_tiers import KvTiers
from kv_transfer.layout import SAME
from splitserve.config.engine import EngineConfig
from splitserve.generation.kv_blocks import blocks_for
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import resolve_model

Source = Literal["computed", "pool", "host", "disk"]
TAIL_TOKENS = 16
"""Computed in any case: what is new in the prompt."""


@dataclass(frozen=True)
class TtftRow:
    """Medians over the turns of a prompt whose prefix of `tokens` lies in one place; the ratio is of neighbours."""

    source: Source
    tokens: int
    ttft_ms: float
    of_computed: float


@dataclass(frozen=True)
class TraceRow:
    """A trace of conversations, one prompt after another, with tiers of these numbers of blocks."""

    trace: str
    tiers: str
    pool_blocks: int
    host_blocks: int
    hit_share: float
    hit_share_endless: float
    ttft_mean_ms: float


class TieredEngine:
    """A model whose engine is made anew over the same weights, with an empty pool each time."""

    def __init__(self, model: str, dtype: str, threads: int, num_blocks: int, folder: Path) -> None:
        self._folder = folder
        self._config = EngineConfig.model_validate(
            {"dtype": dtype, "threads": threads, "num_blocks": num_blocks}
        )
        source = resolve_model(model)
        self._tokenizer = load_tokenizer(source.tokenizer_source)
        self._runner = build_torch_runner(self._config, source, lambda _fraction: None)
        warm_up(self._runner, None)
        self._woken = threading.Event()
        self._tiers: KvTiers | None = None
        self._asked = 0
        self.block_bytes = self._runner.layout.block_bytes
        self.block_tokens = self._runner.layout.block_size_tokens
        self._core = EngineCore(self._runner, self._config, self._tokenizer)

    def restart(self, host_blocks: int, *, disk: bool = False, keep_host: bool = False) -> None:
        """Begins with an empty pool. `keep_host`: host memory stays as it is; a disk always does."""
        if not keep_host:
            if self._tiers is not None:
                self.settle()
                self._tiers.close()
            config = self._config
            if host_blocks:
                values: dict[str, object] = {"kv_host_tier_bytes": host_blocks * self.block_bytes}
                if disk:
                    values |= {"kv_disk_tier_path": self._folder, "kv_disk_tier_bytes": 2**32}
                config = EngineConfig.model_validate({**config.model_dump(), **values})
            self._tiers = make_tiers(config, self._runner.pool_memory, SAME)
            if self._tiers is not None:
                self._tiers.wake = self._woken.set
        self._core = EngineCore(self._runner, self._config, self._tokenizer, tiers=self._tiers)

    def forget_disk(self) -> None:
        """Removes what earlier runs left."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Milliseconds to the first token, and how many tokens were not computed."""
        self._asked += 1
        request = EngineRequest(
            str(self._asked),
            tuple(prompt),
            SamplingParams(temperature=0.0),
            StopParams(max_tokens=1),
            prefill_only=True,
        )
        began, cached, done = time.perf_counter(), 0, False
        self._core.add_request(request)
        while not done:
            self._advance()
            if self._core.has_work():
                result = self._core.step()
                cached = max((each.cached_tokens for each in result.progress), default=cached)
                done = bool(result.outputs)
        ended = time.perf_counter()
        self._core.release_held(request.request_id)
        return 1e3 * (ended - began), cached

    def settle(self) -> None:
        """Waits until everything has been copied."""
        while self._tiers is not None and self._tiers.busy:
            self._advance()

    def close(self) -> None:
        """Lets go of the model."""
        self.settle()
        self._core.close()

    def _advance(self) -> None:
        if self._tiers is None:
            return
        if not self._core.has_work():
            self._woken.wait(0.05)
        if self._woken.is_set():
            self._woken.clear()
            self._tiers.collect()


def ttft_rows(engine: TieredEngine, tokens: int, turns: int) -> list[TtftRow]:
    """Each turn has a new prefix: it is computed, found in the pool, read from host memory, read from the disk."""
    blocks = 2 * blocks_for(tokens + TAIL_TOKENS, engine.block_tokens)
    times: dict[Source, list[float]] = {"computed": [], "pool": [], "host": [], "disk": []}
    dice = random.Random(tokens)

    def words(count: int) -> list[int]:
        return [dice.randrange(1000, 30_000) for _ in range(count)]

    for turn in range(turns + 1):
        prefix = words(tokens)
        engine.forget_disk()
        engine.restart(blocks, disk=True)
        taken: dict[Source, float] = {}
        for source in times:
            if source == "host":
                engine.restart(blocks, keep_host=True)
            elif source == "disk":
                engine.restart(blocks, disk=True)
            taken[source], cached = engine.ask(prefix + words(TAIL_TOKENS))
            if (cached >= tokens - engine.block_tokens) != (source != "computed"):
                raise AssertionError(f"{source}: {cached} of {tokens} tokens were found")
            engine.settle()
        if turn:  # the first one warms up
            for source, spent in taken.items():
                times[source].append(spent)
    computed = times["computed"]
    return [
        TtftRow(
            source,
            tokens,
            round(median(spent), 1),
            round(median(one / other for one, other in zip(spent, computed, strict=True)), 3),
        )
        for source, spent in times.items()
    ]


def trace_rows(
    engine: TieredEngine, trace: Conversations, pool_blocks: int, endless_share: float
) -> list[TraceRow]:
    """The trace without tiers, with host memory of four times the pool, and with a disk below a smaller one."""
    rows = []
    for name, host, disk in (
        ("none", 0, False),
        ("host", 4 * pool_blocks, False),
        ("host, disk", pool_blocks, True),
    ):
        engine.forget_disk()
        engine.restart(host, disk=disk)
        prompts = trace.prompts()
        asked = [engine.ask(prompt) for prompt in prompts]
        share = sum(cached for _, cached in asked) / sum(map(len, prompts))
        ttft_ms = mean(spent for spent, _ in asked)
        rows.append(
            TraceRow(
                "conversations",
                name,
                pool_blocks,
                host,
                round(share, 4),
                round(endless_share, 4),
                round(ttft_ms, 1),
            )
        )
    return rows
