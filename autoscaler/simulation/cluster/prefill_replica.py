"""A simulated prefill replica: one queue, steps of chunks, as the engine's scheduler cuts them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from autoscaler.simulation.cluster.local_prompts import chunk
from autoscaler.simulation.cluster.replica import CacheChanges, EventQueue, PrefillReplica, SimulatedRequest
from autoscaler.simulation.traces.trace import BLOCK_TOKENS
from autoscaler.sizing.engine_model import EngineModel
from engine.core.step_stats import StepRates


class ClosedFormPrefill(PrefillReplica):
    """What its steps have done, and its prefix cache. Calls `done` with each complete prompt, the time, and the time
    when its KV is on decode."""

    def __init__(
        self,
        name: str,
        ordered_s: float,
        engine: EngineModel,
        cache: PrefixCache | None,
        done: Callable[[SimulatedRequest, float, float], None],
    ) -> None:
        super().__init__(name, ordered_s)
        self._engine, self._cache, self._done = engine, cache, done
        self._rates = StepRates()
        self._lane_free_s = self._busy_s = 0.0
        self._computed_tokens = 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens computed so far."""
        return self._computed_tokens

    @property
    def busy_s(self) -> float:
        """Seconds spent computing so far."""
        return self._busy_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """As workers report it; 0 until measured."""
        return self._rates.prefill_tokens_per_s

    @property
    def tells_cache(self) -> bool:
        """Whether this replica has a prefix cache of its own, whose changes the router learns."""
        return self._cache is not None and self._cache.changes is not None

    @property
    def cache_has_changed(self) -> bool:
        """Whether `take_cache_changes` has something to tell."""
        return self._cache is not None and bool(self._cache.changes)

    def take_cache_changes(self) -> CacheChanges:
        """What has changed since the last call."""
        assert self._cache is not None
        return self._cache.take_changes()

    def _computed(self, tokens: int, written: int, began_s: float, now_s: float) -> None:
        """A step has ended, of whose tokens so many are written. Writes overlap with the next one; the lane carries one
        chunk after the other."""
        self._computed_tokens += tokens
        self._busy_s += now_s - began_s
        self._rates.record(tokens, now_s - began_s)
        self._lane_free_s = max(self._lane_free_s, now_s) + self._engine.transfer_s(written)

    def _complete(self, request: SimulatedRequest, now_s: float) -> None:
        """The prompt is computed."""
        if self._cache is not None:
            self._cache.keep(request.block_ids)
        self._done(request, now_s, self._lane_free_s)


class ChunkedPrefill(ClosedFormPrefill):
    """Computes prompts in steps of chunks."""

    def __init__(
        self,
        name: str,
        ordered_s: float,
        engine: EngineModel,
        events: EventQueue,
        cache: PrefixCache | None,
        done: Callable[[SimulatedRequest, float, float], None],
    ) -> None:
        super().__init__(name, ordered_s, engine, cache, done)
        self._events = events
        self._waiting: deque[SimulatedRequest] = deque()
        self._running: list[SimulatedRequest] = []
        self._step: list[tuple[SimulatedRequest, int]] | None = None
        self._began_s = 0.0
        self._queued_tokens = 0

    @property
    def waiting(self) -> int:
        """Prompts not started yet."""
        return len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute, of waiting and running prompts."""
        return self._queued_tokens

    @property
    def load(self) -> int:
        """Prompts that run or wait."""
        return len(self._waiting) + len(self._running)

    def enqueue(self, request: SimulatedRequest, now_s: float) -> None:
        """Queues a prompt for which decode has reserved KV."""
        if self._cache is not None:
            request.cached = request.computed = self._cache.cached_tokens(
                request.block_ids, request.prompt_tokens
            )
        self._queued_tokens += request.remaining
        self._waiting.append(request)
        if self._step is None:
            self._begin(now_s)

    def lose(self, now_s: float) -> Mapping[SimulatedRequest, int]:
        """Its machine is taken away with all that it holds. No answer is here."""
        self._waiting.clear()
        self._running, self._step, self._queued_tokens = [], None, 0
        return {}

    def withdraw(self, request: SimulatedRequest, now_s: float) -> None:
        """Gives up a prompt; nothing happens while that waits for its reservation. The step that it is in takes as long
        as planned."""
        if request in self._waiting:
            self._queued_tokens -= request.remaining
            self._waiting.remove(request)
            return
        if request not in self._running:
            return
        self._queued_tokens -= request.remaining
        self._running.remove(request)
        self._step = [(one, tokens) for one, tokens in self._step or [] if one is not request]

    def _begin(self, now_s: float) -> None:
        budget = self._engine.max_step_tokens
        given: list[int] = []
        for request in self._running:
            tokens = chunk(request.remaining, budget) if budget else 0
            given.append(tokens)
            budget -= tokens
        while budget > 0 and self._waiting and len(self._running) < self._engine.max_running_requests:
            request = self._waiting.popleft()
            request.started_s = now_s
            self._running.append(request)
            tokens = chunk(request.remaining, budget)
            given.append(tokens)
            budget -= tokens
        duration_s = self._engine.prefill_base_s
        step = []
        for request, tokens in zip(self._running, given, strict=True):
            if budget:
                more = min(request.remaining - tokens, budget)
                tokens += more  # noqa: PLW2901 - the remaining budget goes to the first in line
                budget -= more
            if tokens:
                duration_s += self._engine.prefill_s(request.computed, request.computed + tokens)
                step.append((request, tokens))
        self._step, self._began_s = step, now_s
        self._events.at(now_s + duration_s, self._end)

    def _end(self, now_s: float) -> None:
        if self.ended_s is not None:
            return
        step, self._step = self._step or [], None
        total = 0
        complete = []
        for request, tokens in step:
            request.computed += tokens
            total += tokens
            if not request.remaining:
                complete.append(request)
        self._queued_tokens -= total
        self._computed(total, total, self._began_s, now_s)
        if complete:
            gone = set(map(id, complete))
            self._running = [request for request in self._running if id(request) not in gone]
        if self._running or self._waiting:
            self._begin(now_s)
        for request in complete:
            self._complete(request, now_s)


class PrefixCache:
    """LRU cache of 512-token blocks. An id names its block together with all blocks before it."""

    def __init__(self, capacity_tokens: int, keeps_changes: bool = False) -> None:
        self._capacity = max(1, capacity_tokens // BLOCK_TOKENS)
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.changes: dict[int, bool] | None = {} if keeps_changes else None
        """Blocks stored (True) or evicted (False) since this was last emptied; None when not tracked."""

    def take_changes(self) -> CacheChanges:
        """What has changed since the last call."""
        changes, self.changes = self.changes or {}, {}
        # Parents first: the cache inserts a prompt's blocks from its end.
        stored = [block for block, is_stored in reversed(changes.items()) if is_stored]
        return CacheChanges(stored, [block for block, is_stored in changes.items() if not is_stored])

    def cached_tokens(self, block_ids: Sequence[int], prompt_tokens: int) -> int:
        """Prompt tokens that are cached. The last token is always computed."""
        hits = 0
        for block in block_ids:
            if block not in self._blocks:
                break
            hits += 1
        return min(hits * BLOCK_TOKENS, prompt_tokens - 1)

    def keep(self, block_ids: Sequence[int]) -> None:
        """Stores the blocks of a computed prompt, evicting the least recently used."""
        blocks, changes = self._blocks, self.changes
        # The last block goes in first, so that eviction shortens a chain from its end.
        for block in reversed(block_ids):
            if block in blocks:
                blocks.move_to_end(block)
                continue
            blocks[block] = None
            if changes is not None:
                changes[block] = True
        for _ in range(len(blocks) - self._capacity):
            evicted, _ = blocks.popitem(last=False)
            if changes is not None:
                changes[evicted] = False
