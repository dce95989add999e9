"""Connected prefill and decode engines in one process, stepped by hand: no gRPC, a clock that tests set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from decode_worker.kv_consumer import KvConsumer, Outputs
from decode_worker.requests import Granted, WaitingReservation
from engine.core.engine import EngineRequest, StopParams
from engine.core.engine_core import EngineCore
from engine.core.model_runner import SamplingParams
from engine.runner.simulated_runner import SimulatedRunner
from engine.runner.structured_output import GrammarCompiler
from kv_transfer.handoff.messages import KvTicket
from prefill_worker.kv_producer import FirstTokenReady, KvProducer, PrefillEvent
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import SplitserveError
from splitserve.generation.output_delta import output_of
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.tracing.context import FinishedSpan
from splitserve.v1 import decode_pb2
from tests.support.transfer.memory_transport import MemoryHub, MemoryTransport
from worker.build import EngineParts, ServedAs

COORDINATOR = "c"
MAX_TOKENS = 12
FREE_TIME = {"simulated_prefill_token_s": 0.0, "simulated_step_s": 0.0, "simulated_sequence_s": 0.0}


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ConnectorPair:
    """One prefill and one decode engine, stepped by hand."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_step_tokens: int = 32,
        runner: type[SimulatedRunner] = SimulatedRunner,
        verify_kv: Literal["off", "all"] = "off",
    ) -> None:
        self.clock = Clock()
        self._runner, self._verify_kv = runner, verify_kv
        hub = MemoryHub()
        engine = EngineConfig(
            kind="simulated",
            block_size_tokens=8,
            num_blocks=num_blocks,
            max_step_tokens=max_step_tokens,
            **FREE_TIME,
        )
        self.prefill_events: dict[str, list[PrefillEvent]] = defaultdict(list)
        self.decode_outputs: dict[str, list[decode_pb2.SequenceOutput]] = defaultdict(list)
        prefill_parts, decode_parts = self._parts("p", engine, hub), self._parts("d", engine, hub)
        self.prefill, self.decode = prefill_parts.core, decode_parts.core
        self.idle: list[str] = []
        self.on_prefill: Callable[[str, PrefillEvent], object] = lambda request_id, event: None
        self.prefill_spans: list[FinishedSpan] = []
        self.decode_spans: list[FinishedSpan] = []
        self.producer = KvProducer(
            prefill_parts, self._on_prefill, lambda: self.idle.append("p"), spans=self.prefill_spans.extend
        )
        self.consumer = KvConsumer(
            decode_parts, 77, self._on_decode, lambda: self.idle.append("d"), self.decode_spans.extend
        )
        self.producer.connect(decode_parts.endpoint)

    def _parts(self, name: str, engine: EngineConfig, hub: MemoryHub) -> EngineParts:
        config = WorkerConfig(worker_id=name, model="simulated", engine=engine, verify_kv=self._verify_kv)
        runner = self._runner(engine)
        transport = MemoryTransport(hub)
        endpoint = transport.register_memory(runner.kv_memory.region)
        core = EngineCore(runner, engine, load_tokenizer("simulated"), self.clock)
        grammars = GrammarCompiler(load_tokenizer("simulated"), runner.facts)
        served = ServedAs("simulated", "simulated")
        return EngineParts(
            core, runner.facts, runner.kv_memory, grammars, transport, endpoint, served, config
        )

    def _on_prefill(self, events: list[tuple[str, PrefillEvent]]) -> None:
        for request_id, event in events:
            self.prefill_events[request_id].append(event)
            self.on_prefill(request_id, event)

    def _on_decode(self, outputs: Outputs) -> None:
        for coordinator, batch in outputs.items():
            self.decode_outputs[coordinator] += [output_of(*row) for row in batch]

    def reserve(
        self, name: str, prompt: list[int], local_prefill_tokens: int = 0, **fields: Any
    ) -> list[Granted | SplitserveError]:
        """`fields` replace those of the engine's request."""
        answers: list[Granted | SplitserveError] = []
        entry = WaitingReservation(
            self._request(f"{COORDINATOR}/{name}", prompt, prefill_only=False, **fields),
            COORDINATOR,
            self.producer.endpoint.agent_id,
            self.clock.now,
            answers.append,
            local_prefill_tokens=local_prefill_tokens,
        )
        self.consumer.reserve(self.decode, entry, self.clock.now)
        return answers

    def start(self, name: str, prompt: list[int], ticket: KvTicket | None, **fields: Any) -> None:
        asked = self._request(name, prompt, prefill_only=True, **fields)
        self.producer.start(self.prefill, asked, ticket, self.clock.now)

    def _request(self, name: str, prompt: list[int], *, prefill_only: bool, **fields: Any) -> EngineRequest:
        stop = StopParams(max_tokens=MAX_TOKENS)
        deadline_s = self.clock.now + 300
        made = EngineRequest(
            name, tuple(prompt), SamplingParams(), stop, deadline_s=deadline_s, prefill_only=prefill_only
        )
        return replace(made, **fields)

    def round(self) -> None:
        """One iteration of both engine threads."""
        for core, connector in ((self.prefill, self.producer), (self.decode, self.consumer)):
            connector.before_step(core, self.clock.now)
            core.collect()
            if not core.result_can_wait:
                self.deliver(core, connector)
            if core.has_work():
                core.begin_step()
                self.deliver(core, connector)
                core.finish_step()
            if not core.result_can_wait:
                self.deliver(core, connector)

    def deliver(self, core: EngineCore, connector: KvProducer | KvConsumer) -> None:
        if (result := core.take_result()) is not None:
            connector.after_step(core, result, self.clock.now)

    def tokens(self, name: str) -> list[int]:
        first = [event for event in self.prefill_events[name] if isinstance(event, FirstTokenReady)]
        tokens = list(first[0].output.token_ids) if first else []
        for output in self.decode_outputs[COORDINATOR]:
            if output.request_id == name:
                assert not output.delta.token_ids or output.delta.first_position == len(tokens)
                tokens.extend(output.delta.token_ids)
        return tokens

    def assert_empty(self) -> None:
        for core in (self.prefill, self.decode):
            load = core.load()
            assert (load.reserved_blocks, load.quarantined_blocks, load.referenced_blocks) == (0, 0, 0)
            assert load.free_blocks == load.total_blocks
            assert load.running_requests == load.waiting_requests == 0
        for status in (self.producer.status, self.consumer.status):
            assert (status.in_progress, status.transfers_in_flight, status.waiting_reservations) == (0, 0, 0)


def ticket_of(answers: list[Granted | SplitserveError]) -> KvTicket:
    assert len(answers) == 1
    assert isinstance(answers[0], Granted)
    return answers[0].ticket


def run(pair: ConnectorPair, name: str, prompt: list[int], rounds: int = 40) -> list[int]:
    pair.start(name, prompt, ticket_of(pair.reserve(name, prompt)))
    for _ in range(rounds):
        pair.round()
    return pair.tokens(name)
