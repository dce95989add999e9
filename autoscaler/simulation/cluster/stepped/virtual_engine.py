"""The engine's own core on the virtual clock: scheduler, blocks, token clock and triage as workers run them.

Only the model is simulated: a step takes what `EngineModel` says, and every token is the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoscaler.simulation.cluster.replica import EventQueue
from autoscaler.simulation.cluster.stepped.lent_cores import Borrows, CoreSlot
from autoscaler.sizing.engine_model import EngineModel
from engine.core.engine_core import EngineCore
from engine.core.model_runner import ModelRunner, PendingStep
from engine.core.step_stats import StepMeter
from engine.core.types import ModelFacts, SampledToken, ScheduledSequence, StepResult
from engine.pacing.lending import asks_for_rests
from engine.worker.warm_up.decode_steps import STREAMS
from kv_transfer.layout import KvLayout
from kv_transfer.transports.transport import DRAM, KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.errors import InvalidArgumentError
from splitserve.models.tokenizer import Turn

VOCABULARY_SIZE = 2**20
TOKEN = 0
"""Every output token."""
KV_BLOCK_TOKENS = 16
_MOST_WAITING = 10**6


class VirtualEngine:
    """Steps an engine core whenever it has work. Calls `stepped` with the time and what a step has produced.

    What changes the core's requests is handed to `between_steps`, because a core takes nothing during a step.
    """

    def __init__(
        self,
        model: EngineModel,
        events: EventQueue,
        prefix_cache: bool,
        stepped: Callable[[StepResult, float, float], None],
        slot: CoreSlot | None = None,
    ) -> None:
        """`stepped` gets the result, and when its step began and ended. `slot`: its cores, where they are lent."""
        self._events, self._slot = events, slot
        self._stepped = stepped
        self._now_s = self._began_s = 0.0
        self._stepping = False
        self._changes: list[Callable[[EngineCore], None]] = []
        self._looks = 0
        """Numbers the looks at whether a rest is over."""
        self._runner = VirtualRunner(model, slot, lambda: self._now_s)
        config = EngineConfig(
            kind="simulated",
            block_size_tokens=KV_BLOCK_TOKENS,
            max_step_tokens=model.max_step_tokens,
            max_running_requests=model.max_running_requests,
            max_waiting_requests=_MOST_WAITING,
            context_tokens=model.context_tokens,
            prefix_cache=prefix_cache,
        )
        meter = StepMeter()
        _measure_decode_steps(meter, model)
        self.core = EngineCore(self._runner, config, _NoText(), lambda: self._now_s, meter=meter)

    def between_steps(self, now_s: float, change: Callable[[EngineCore], None]) -> None:
        """Applies a change to the core: now, or as soon as the step under way has ended."""
        self._changes.append(change)
        if not self._stepping:
            self._go_on(now_s)

    def _go_on(self, now_s: float) -> None:
        """Applies what has changed, and begins a step if there is work."""
        self._now_s = now_s
        while self._changes:
            changes, self._changes = self._changes, []
            for change in changes:
                change(self.core)
        if not self.core.has_work():
            self._look_later()
            return
        self._stepping, self._began_s = True, now_s
        self._runner.took_s = 0.0
        self.core.begin_step()
        if self._slot is None:
            self._events.at(now_s + self._runner.took_s, self._end)
        else:
            self._slot.compute(now_s, self._runner.took_s, self._runner.borrows, self._end)

    def _look_later(self) -> None:
        """Goes on when the core asks for it, if nothing happens before: it rests for a neighbour's sake."""
        self._looks += 1
        number, look_s = self._looks, self.core.next_deadline()

        def look(now_s: float) -> None:
            if number == self._looks and not self._stepping:
                self._go_on(now_s)

        if look_s < float("inf"):
            self._events.at(look_s, look)

    def _end(self, now_s: float) -> None:
        self._now_s = now_s
        self.core.finish_step()
        result = self.core.take_result()
        if result is not None:
            # Still within the step: what the replica does about its result comes before the next one.
            self._stepped(result, self._began_s, now_s)
        self._stepping = False
        self._go_on(now_s)


class VirtualRunner(ModelRunner):
    """Computes nothing; says how long a step takes."""

    def __init__(self, model: EngineModel, slot: CoreSlot | None, clock: Callable[[], float]) -> None:
        self._model, self._slot, self._clock = model, slot, clock
        self.took_s = 0.0
        """Of the steps begun since this was last set to 0, seconds, on the replica's own cores."""
        self.borrows: Borrows = "idle"
        """What the latest step can use of neighbours' cores."""
        self.facts = ModelFacts(model.context_tokens, VOCABULARY_SIZE, frozenset())
        self.layout = KvLayout("virtual", "uint8", KV_BLOCK_TOKENS, 1, 1, 1)

    @property
    def num_blocks(self) -> int:
        """See ModelRunner."""
        return max(2, self._model.kv_capacity_tokens // KV_BLOCK_TOKENS)

    @property
    def pool_memory(self) -> KvMemoryRegion:
        """See ModelRunner. There is no memory."""
        return KvMemoryRegion(0, self.num_blocks, self.layout, memory_kind=DRAM)

    @property
    def mixes_steps(self) -> bool:
        """See ModelRunner."""
        return not self._model.separate_steps

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """See ModelRunner."""
        return [memoryview(b"") for _ in block_ids]

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        """See ModelRunner."""
        self.took_s += self._model.step_of(
            [(each.num_computed, each.num_computed + each.num_new) for each in batch if not _decodes(each)],
            [each.num_computed + 1 for each in batch if _decodes(each)],
        )
        tokens, decode_only = sum(each.num_new for each in batch), all(_decodes(each) for each in batch)
        self.borrows = "wanted" if asks_for_rests(tokens, decode_only=decode_only) else "idle"
        sampled: list[SampledToken | None] = [SampledToken(TOKEN) if each.sample else None for each in batch]
        return lambda: sampled

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """See ModelRunner."""
        return self.begin(batch)()

    @property
    def speedup(self) -> float:
        """See ModelRunner."""
        return 1.0 if self._slot is None else self._slot.speedup

    @property
    def shares_cores(self) -> bool:
        """See ModelRunner."""
        return self._slot is not None

    def rest(self) -> None:
        """See ModelRunner."""
        if self._slot is not None:
            self._slot.rest(self._clock())

    def demand(self) -> int | None:
        """See ModelRunner."""
        return None if self._slot is None else self._slot.demand()

    def close(self) -> None:
        """See ModelRunner."""


def _measure_decode_steps(meter: StepMeter, model: EngineModel) -> None:
    """As workers do before their first request."""
    for streams in sorted({min(streams, model.max_running_requests) for streams in STREAMS}):
        took_s = model.decode_step_s(streams, streams)
        if took_s > 0:
            meter.fit.record(streams, streams, took_s)
            meter.fit.refit()


def _decodes(sequence: ScheduledSequence) -> bool:
    return sequence.num_new == 1 and sequence.num_computed >= sequence.prompt_tokens


class _NoText:
    """A tokenizer whose tokens have no text."""

    vocabulary_size = VOCABULARY_SIZE
    has_chat_template = False

    def encode(self, text: str, most: int | None = None) -> list[int]:
        raise InvalidArgumentError("simulated prompts have no text", field="text")

    def render_chat(
        self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = (), most: int | None = None
    ) -> list[int]:
        raise InvalidArgumentError("simulated prompts have no text", field="messages")

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""
