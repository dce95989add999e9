"""A neutral replica in closed form: its steps have a token of every sequence and chunks of all its prompts, those for
others among them. KV of prompts for others is not counted, as on prefill replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autoscaler.simulation.cluster.decode_replica import ClosedFormDecode
from autoscaler.simulation.cluster.local_prompts import LocalPrompt
from autoscaler.simulation.cluster.neutral_replica import NeutralReplica
from autoscaler.simulation.cluster.prefill_replica import ClosedFormPrefill, PrefixCache
from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.sizing.engine_model import EngineModel
from autoscaler.snapshot import PoolName
from engine.pacing.step_time_fit import DecodeStepFit


class ClosedFormNeutral(NeutralReplica):
    """Calls `computed` as ChunkedPrefill does, and `reserved` and `decoded` as ClosedFormDecode."""

    def __init__(
        self,
        name: str,
        ordered_s: float,
        leans: PoolName,
        engine: EngineModel,
        events: EventQueue,
        cache: PrefixCache | None,
        computed: Callable[[SimulatedRequest, float, float], None],
        reserved: Callable[[SimulatedRequest, float], None],
        decoded: Callable[[SimulatedRequest, float], None],
    ) -> None:
        super().__init__(name, ordered_s, leans)
        self._streams = _Streams(name, ordered_s, engine, events, reserved, decoded, cache)
        self._prompts = _PromptsForOthers(name, ordered_s, engine, cache, self._streams, computed)
        self._streams.on_step = self._prompts.stepped
        self.bind(self._prompts, self._streams)

    @property
    def local_tokens(self) -> int:
        """See DecodeReplica."""
        return self._streams.local_tokens - self._prompts.queued_tokens

    @property
    def backlog_tokens(self) -> int:
        """See NeutralReplica."""
        return self._streams.local_tokens

    def lose(self, now_s: float) -> Mapping[SimulatedRequest, int]:
        """See ClosedFormDecode."""
        self._streams.ended_s = now_s
        self._prompts.lose()
        return self._streams.lose(now_s)

    def withdraw(self, request: SimulatedRequest, now_s: float) -> None:
        """Gives up a request whose prompt is not computed, or not by this replica."""
        if request.prefill is self:
            self._prompts.withdraw(request)
        if request.decode is self:
            self._streams.withdraw(request, now_s)


class _Streams(ClosedFormDecode):
    """What it decodes. Its steps are known from the start, as a neutral worker measures them before its first
    request."""

    @property
    def step_fit(self) -> DecodeStepFit | None:
        engine = self._engine
        return DecodeStepFit(engine.step_s, engine.sequence_s, engine.context_token_s)


class _PromptsForOthers(ClosedFormPrefill):
    """The prompts whose answers others decode, in the steps of the streams here."""

    def __init__(
        self,
        name: str,
        ordered_s: float,
        engine: EngineModel,
        cache: PrefixCache | None,
        streams: _Streams,
        done: Callable[[SimulatedRequest, float, float], None],
    ) -> None:
        super().__init__(name, ordered_s, engine, cache, done)
        self._streams = streams
        self._prompts: dict[SimulatedRequest, LocalPrompt] = {}

    @property
    def load(self) -> int:
        return len(self._prompts)

    @property
    def waiting(self) -> int:
        return sum(request.started_s is None for request in self._prompts)

    @property
    def queued_tokens(self) -> int:
        return sum(prompt.remaining for prompt in self._prompts.values())

    def enqueue(self, request: SimulatedRequest, now_s: float) -> None:
        if self._cache is not None:
            request.cached = self._cache.cached_tokens(request.block_ids, request.prompt_tokens)

        def done(at_s: float) -> None:
            del self._prompts[request]
            self._complete(request, at_s)

        cached = request.cached if self._cache is not None else 0
        prompt = LocalPrompt(request, request.kv_tokens, cached, done)
        self._prompts[request] = prompt
        self._streams.compute(prompt, now_s)

    def stepped(self, step: Sequence[tuple[LocalPrompt, int]], began_s: float, now_s: float) -> None:
        """A step with these prompts has ended."""
        total = sum(tokens for _, tokens in step)
        written = sum(tokens for prompt, tokens in step if self._prompts.get(prompt.request) is prompt)
        self._computed(total, written, began_s, now_s)

    def lose(self) -> None:
        """All of them are gone, with the streams."""
        self._prompts.clear()

    def withdraw(self, request: SimulatedRequest) -> None:
        """Gives up a prompt; nothing happens while that waits for its reservation."""
        if (prompt := self._prompts.pop(request, None)) is not None:
            self._streams.give_up(prompt)
