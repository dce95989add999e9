"""What an engine does while it has nothing to do: what requests would wait for otherwise.

Steps whose first time makes something (graphs are captured and checked) and the first touch of the KV blocks' memory
take seconds of a core. A start does not wait for them, and steps do not share their cores with them: they are done in
pieces on the engine thread, each only if nothing else is in progress.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from engine.core.engine import Engine
from engine.core.model_runner import ModelRunner, StepShape, made_up
from engine.core.types import RowsFailedError
from engine.kv_cache.block_pool import BlockPool
from engine.worker.engine_thread import BOOT_S, Activity, KvConnector
from engine.worker.status import is_at_rest
from splitserve.errors import UnavailableError
from splitserve.generation.kv_blocks import blocks_for
from splitserve.logs import log_event

QUIET_S = 0.25
"""How long an engine that was busy is left alone, from one look to the next."""
PEERS_S = 0.75
"""How long a worker that has started is: its peers measure their lanes to it."""
CONTEXT_TOKENS = 24
"""Of the sequences that decode in such a step."""


class IdleWork:
    """The pieces that are left. Used on the engine thread, while no block has an owner."""

    def __init__(self, runners: Sequence[ModelRunner], pool: BlockPool, max_step_tokens: int) -> None:
        """`runners`: the engine's own first."""
        self._runners, self._pool, self._max_step_tokens = runners, pool, max_step_tokens
        self._tried: set[StepShape] = set()

    def do_piece(self) -> bool:
        """Does one; up to about a second where something is captured. False: there was none left."""
        runner = self._runners[0]
        for shape in runner.first_steps(self._max_step_tokens):
            if shape not in self._tried:
                self._tried.add(shape)
                self._compute(runner, shape)
                return True
        return any(each.populate() for each in self._runners)

    @property
    def lent(self) -> bool:
        """Whether a neighbour computes on these cores, which is worth more."""
        return self._runners[0].is_lent()

    def _compute(self, runner: ModelRunner, shape: StepShape) -> None:
        lengths = [(CONTEXT_TOKENS, 1)] * shape.decodes + [(0, tokens) for tokens in shape.chunks]
        size = runner.layout.block_size_tokens
        counts = [blocks_for(computed + new, size) for computed, new in lengths]
        longest = max(computed + new for computed, new in lengths)
        if sum(counts) > self._pool.free or longest > runner.facts.context_tokens:
            return
        blocks = self._pool.allocate(sum(counts))
        try:
            left = iter(blocks)
            runner.execute(
                [
                    made_up(runner, computed, new, list(itertools.islice(left, count)), row)
                    for row, ((computed, new), count) in enumerate(zip(lengths, counts, strict=True))
                ]
            )
        except RowsFailedError as error:
            # As in `warm_up`: the model may fail on these tokens and still work on others.
            log_event("worker.warm_up_failed", error=error.message)
        finally:
            self._pool.release(blocks)
            runner.rest()


class IdleEngine(Protocol):
    """The engine thread; see `EngineThread`."""

    async def call(
        self, fn: Callable[[Engine, KvConnector], bool | None], activity: Activity | None = None
    ) -> bool | None:
        """See `EngineThread.call`."""
        ...


async def use_idle_time(engine: IdleEngine, work: IdleWork | None, more: asyncio.Event) -> None:
    """Does all pieces, then those that come up later: `more` is set when a worker has woken up. Until cancelled, or at
    once where there is no such work."""
    if work is None:
        return

    def is_idle(core: Engine, connector: KvConnector) -> bool:
        if core.has_work() or work.lent or not (connector.at_rest and is_at_rest(core.load())):
            return False
        connector.require_awake()
        return True

    def piece(core: Engine, connector: KvConnector) -> bool | None:
        return work.do_piece() if is_idle(core, connector) else None

    await asyncio.sleep(PEERS_S)
    while True:
        with suppress(UnavailableError):  # asleep, or ended
            left: bool | None = None
            while left is not False:
                # Busy at the last look: idle at two looks in a row, or it is between two requests of one client.
                while left is None:
                    await asyncio.sleep(QUIET_S)
                    if await engine.call(is_idle):
                        await asyncio.sleep(QUIET_S)
                        break
                left = await engine.call(piece, Activity("in a step", BOOT_S))
        await more.wait()
        more.clear()
