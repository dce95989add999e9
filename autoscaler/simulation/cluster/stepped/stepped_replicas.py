"""Replicas that are computed step by step, with the engine's own scheduler, token clock and triage.

A step costs what the engine's own host work costs, about a hundred microseconds: for runs of some hundred requests, in
which it matters who is served when. The closed form is for days of a trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autoscaler.simulation.cluster.replica import (
    CacheChanges,
    DecodeReplica,
    EventQueue,
    PrefillReplica,
    SimulatedRequest,
)
from autoscaler.simulation.cluster.stepped.engine_prompts import EngineCacheChanges, prompt_of
from autoscaler.simulation.cluster.stepped.lent_cores import LentCores
from autoscaler.simulation.cluster.stepped.virtual_engine import KV_BLOCK_TOKENS, TOKEN, VirtualEngine
from autoscaler.sizing.engine_model import EngineModel
from engine.core.engine_core import EngineCore
from engine.core.types import EngineRequest, SamplingParams, StepResult, StopParams
from engine.pacing.step_time_fit import DecodeStepFit, PromptFit
from engine.pacing.token_clock import ServiceTargets

GREEDY = SamplingParams(temperature=0.0)
_PREFILL_NUMBERS = 2**40
"""Where the numbers of prompts begin that are computed for others: an engine may have requests of both kinds."""


@dataclass(slots=True)
class _Live:
    """A request at an engine. `number` names it there."""

    number: int
    request: SimulatedRequest
    computed: Callable[[float], None] | None = None
    """Called with the first token, where the prompt is computed beside the stream."""
    done_tokens: int = 0
    """Prompt tokens that need not be computed any more."""
    output_tokens: int = 0

    @property
    def name(self) -> str:
        return str(self.number)


class SteppedPrefill(PrefillReplica):
    """Computes prompts. Calls `done` with each complete prompt, the time, and the time when its KV is on decode."""

    def __init__(
        self,
        name: str,
        ordered_s: float,
        model: EngineModel,
        events: EventQueue,
        targets: ServiceTargets | None,
        prefix_cache: bool,
        done: Callable[[SimulatedRequest, float, float], None],
        engine: VirtualEngine | None = None,
        cores: LentCores | None = None,
    ) -> None:
        """`engine`: of a neutral replica, which has one for both of its parts and passes on what steps produce.
        `cores`: of a host whose replicas lend each other theirs."""
        super().__init__(name, ordered_s)
        self._model, self._events, self._targets, self._done = model, events, targets, done
        slot = cores.slot(lambda: self.is_up) if cores else None
        self._engine = engine or VirtualEngine(model, events, prefix_cache, self.stepped, slot)
        self._cache = EngineCacheChanges(self._engine.core.kv_events) if prefix_cache else None
        self._live: dict[str, _Live] = {}
        self._enqueued = _PREFILL_NUMBERS
        self._lane_free_s = 0.0
        self._computed_tokens = 0
        self._busy_s = 0.0

    @property
    def load(self) -> int:
        """Prompts that run or wait."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """See PrefillReplica."""
        return sum(live.request.started_s is None for live in self._live.values())

    @property
    def queued_tokens(self) -> int:
        """See PrefillReplica."""
        return sum(live.request.prompt_tokens - live.done_tokens for live in self._live.values())

    @property
    def prefill_tokens_per_s(self) -> float:
        """See PrefillReplica."""
        return self._engine.core.load().prefill_tokens_per_s

    @property
    def prompt_fit(self) -> PromptFit | None:
        """See PrefillReplica."""
        return self._engine.core.load().prompt_fit

    @property
    def lent_speedup(self) -> float:
        """See PrefillReplica."""
        return self._engine.core.load().lent_speedup

    @property
    def computed_tokens(self) -> int:
        """See PrefillReplica."""
        return self._computed_tokens

    @property
    def busy_s(self) -> float:
        """See PrefillReplica."""
        return self._busy_s

    @property
    def tells_cache(self) -> bool:
        """See PrefillReplica."""
        return self._cache is not None

    @property
    def cache_has_changed(self) -> bool:
        """See PrefillReplica."""
        return self._cache is not None and self._cache.unread

    def take_cache_changes(self) -> CacheChanges:
        """See PrefillReplica."""
        assert self._cache is not None
        return self._cache.take()

    def enqueue(self, request: SimulatedRequest, now_s: float) -> None:
        """See PrefillReplica."""
        self._enqueued += 1
        live = _Live(self._enqueued, request)
        self._live[live.name] = live
        asked = replace(_asked(live, self._targets), prefill_only=True)
        if self._cache is not None:
            self._cache.expect(asked, request.block_ids)
        self._engine.between_steps(now_s, lambda core: core.add_request(asked))

    def stepped(self, result: StepResult, began_s: float, now_s: float) -> None:
        """Takes what a step of the engine has produced for prompts of this part."""
        self._computed_tokens += result.scheduled_tokens
        self._busy_s += now_s - began_s if result.scheduled_tokens else 0.0
        for name in result.started:
            if (live := self._live.get(name)) is not None:
                live.request.started_s = began_s
        written = 0
        for progress in result.progress:
            live = self._live.get(progress.request_id)
            if live is None:
                continue
            live.request.cached, live.done_tokens = progress.cached_tokens, progress.end
            written += progress.end - progress.start
        # Writes overlap with the next step; the lane carries one chunk after the other.
        self._lane_free_s = max(self._lane_free_s, now_s) + self._model.transfer_s(written)
        for output in result.outputs:
            live = self._live.pop(output.request_id, None)
            if live is None:
                continue
            self._release(live.name, self._lane_free_s)
            self._done(live.request, now_s, self._lane_free_s)

    def _release(self, name: str, at_s: float) -> None:
        """The blocks of a prompt are held until they are written."""

        def release(core: EngineCore) -> None:
            core.release_held(name)

        self._events.at(at_s, lambda now_s: self._engine.between_steps(now_s, release))


class SteppedDecode(DecodeReplica):
    """Decodes sequences. Calls `reserved` when a request has its KV, `done` when it has ended."""

    def __init__(
        self,
        name: str,
        ordered_s: float,
        model: EngineModel,
        events: EventQueue,
        targets: ServiceTargets | None,
        prefix_cache: bool,
        reserved: Callable[[SimulatedRequest, float], None],
        done: Callable[[SimulatedRequest, float], None],
        engine: VirtualEngine | None = None,
        cores: LentCores | None = None,
    ) -> None:
        """`engine` and `cores`: see SteppedPrefill."""
        super().__init__(name, ordered_s)
        self._targets, self._reserved, self._done = targets, reserved, done
        slot = cores.slot(lambda: self.is_up) if cores else None
        self._engine = engine or VirtualEngine(model, events, prefix_cache, self.stepped, slot)
        self._live: dict[str, _Live] = {}
        """Requests that hold a reservation, are computed here or decode."""
        self._by_request: dict[SimulatedRequest, _Live] = {}
        self._waiting: deque[_Live] = deque()
        self._arrived = 0

    @property
    def load(self) -> int:
        """Sequences that run, hold a reservation or wait for one."""
        return len(self._live) + len(self._waiting)

    @property
    def running(self) -> int:
        """See DecodeReplica."""
        return sum(live.output_tokens > 0 for live in self._live.values())

    @property
    def waiting_reservations(self) -> int:
        """See DecodeReplica."""
        return len(self._waiting)

    @property
    def context_tokens(self) -> float:
        """See DecodeReplica. In whole blocks."""
        counts = self._engine.core.pool.counts()
        return float((counts.total - counts.free) * KV_BLOCK_TOKENS)

    @property
    def local_tokens(self) -> int:
        """See DecodeReplica."""
        return sum(
            live.request.prompt_tokens - live.done_tokens
            for live in self._live.values()
            if live.computed is not None and not live.output_tokens
        )

    @property
    def step_s(self) -> float:
        """See DecodeReplica."""
        return self._engine.core.load().decode_step_s if self.running else 0.0

    @property
    def prompt_fit(self) -> PromptFit | None:
        """See DecodeReplica."""
        return self._engine.core.load().prompt_fit

    @property
    def lent_speedup(self) -> float:
        """See DecodeReplica."""
        return self._engine.core.load().lent_speedup

    @property
    def step_fit(self) -> DecodeStepFit | None:
        """See DecodeReplica."""
        return self._engine.core.load().step_fit

    def produced(self, now_s: float) -> Iterator[tuple[SimulatedRequest, int]]:
        """See DecodeReplica."""
        return ((live.request, live.output_tokens) for live in self._live.values() if live.output_tokens)

    def reserve(self, request: SimulatedRequest, now_s: float) -> None:
        """See DecodeReplica. A prompt that is computed here takes its blocks when it is scheduled."""
        self._arrived += 1
        live = _Live(self._arrived, request)
        self._by_request[request] = live
        if request.prefill is None:
            request.reserved_s = now_s
            self._reserved(request, now_s)
            return
        self._waiting.append(live)
        self._engine.between_steps(now_s, lambda core: self._admit(core, now_s))

    def _admit(self, core: EngineCore, now_s: float) -> None:
        while self._waiting:
            live = self._waiting[0]
            if core.reserve(_asked(live, self._targets), live.number) is None:
                break
            self._waiting.popleft()
            self._live[live.name] = live
            live.request.reserved_s = now_s
            self._reserved(live.request, now_s)
        core.reservations_wait(bool(self._waiting))

    def prefill_here(
        self, request: SimulatedRequest, now_s: float, computed: Callable[[float], None]
    ) -> None:
        """See DecodeReplica."""
        live = self._by_request[request]
        live.computed = computed
        self._live[live.name] = live
        asked = _asked(live, self._targets)
        self._engine.between_steps(now_s, lambda core: core.add_request(asked))

    def join(self, request: SimulatedRequest, now_s: float) -> None:
        """See DecodeReplica."""
        live = self._by_request[request]
        if live.computed is not None:
            return

        def admit(core: EngineCore) -> None:
            live.output_tokens = 1
            core.admit(live.number, TOKEN)
            core.release_writer(live.number)

        self._engine.between_steps(now_s, admit)

    def leave(self, request: SimulatedRequest, now_s: float) -> None:
        """See DecodeReplica."""
        live = self._by_request.pop(request)
        self._live.pop(live.name, None)

        def end(core: EngineCore) -> None:
            core.abort(live.name)
            core.release_writer(live.number)
            self._admit(core, now_s)

        self._engine.between_steps(now_s, end)

    def stepped(self, result: StepResult, began_s: float, now_s: float) -> None:
        """Takes what a step of the engine has produced for requests of this part."""
        for name in result.started:
            live = self._live.get(name)
            if live is not None and live.request.started_s is None:
                live.request.started_s = began_s
        for progress in result.progress:
            live = self._live.get(progress.request_id)
            if live is None:
                continue
            live.done_tokens = min(progress.end, live.request.prompt_tokens)
            live.request.cached = progress.cached_tokens
        for output in result.outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            first, live.output_tokens = not live.output_tokens, live.output_tokens + len(output.token_ids)
            if first and live.computed is not None:
                live.computed(now_s)
            if output.finish_reason is not None:
                del self._live[live.name], self._by_request[live.request]
                self._done(live.request, now_s)
        if self._waiting:
            self._engine.between_steps(now_s, lambda core: self._admit(core, now_s))


def _asked(live: _Live, targets: ServiceTargets | None) -> EngineRequest:
    """What the engine is asked. The last token of the answer ends it."""
    request = live.request
    tokens, salt = prompt_of(request, live.number)
    if targets is not None and targets.ttft_s is not None:
        targets = replace(targets, first_due_s=request.arrival_s + targets.ttft_s)
    stop = StopParams(max(1, request.output_tokens), ignore_eos=True)
    return EngineRequest(live.name, tokens, GREEDY, stop, cache_salt=salt, targets=targets)
