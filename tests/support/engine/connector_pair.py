"""Connected prefill and decode engines in one process, stepped by hand: no gRPC, a clock that tests set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
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
from worker.connector import WorkerStatus

COORDINATOR = "c"
MAX_TOKENS = 12
FREE_TIME = {"simulated_prefill_token_s": 0.0, "simulated_step_s": 0.0, "simulated_sequence_s": 0.0}


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def engine_config(num_blocks: int, max_step_tokens: int, **engine: Any) -> EngineConfig:
    """Blocks of 8 tokens, and steps that take no time."""
    return EngineConfig(
        kind="simulated",
        block_size_tokens=8,
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        **FREE_TIME,
        **engine,
    )


def engine_parts(
    config: WorkerConfig,
    transport: MemoryTransport,
    clock: Clock,
    runner_class: type[SimulatedRunner] = SimulatedRunner,
) -> EngineParts:
    """A worker's engine, its memory registered with the transport."""
    runner, tokenizer = runner_class(config.engine), load_tokenizer("simulated")
    endpoint = transport.register_memory(runner.kv_memory.region)
    core = EngineCore(runner, config.engine, tokenizer, clock)
    grammars, served = GrammarCompiler(tokenizer, runner.facts), ServedAs("simulated", "simulated")
    return EngineParts(core, runner.facts, runner.kv_memory, grammars, transport, endpoint, served, config)


def request_of(
    name: str, prompt: list[int], clock: Clock, *, prefill_only: bool, **fields: Any
) -> EngineRequest:
    """A request; `fields` replace those of the engine's request."""
    stop = StopParams(max_tokens=fields.pop("max_tokens", MAX_TOKENS))
    usual = {"sampling": SamplingParams(), "stop": stop, "deadline_s": clock.now + 300}
    return EngineRequest(name, tuple(prompt), prefill_only=prefill_only, **(usual | fields))


def assert_unused(core: EngineCore, status: WorkerStatus) -> None:
    """Nothing is held, and nothing runs or waits."""
    load = core.load()
    assert (load.reserved_blocks, load.quarantined_blocks, load.referenced_blocks) == (0, 0, 0)
    assert load.free_blocks == load.total_blocks
    assert load.running_requests == load.waiting_requests == 0
    assert (status.in_progress, status.transfers_in_flight, status.waiting_reservations) == (0, 0, 0)


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
        hub, engine = MemoryHub(), engine_config(num_blocks, max_step_tokens)
        self.prefill_events: dict[str, list[PrefillEvent]] = defaultdict(list)
        self.decode_outputs: dict[str, list[decode_pb2.SequenceOutput]] = defaultdict(list)
        configs = (
            WorkerConfig(worker_id=name, model="simulated", engine=engine, verify_kv=verify_kv)
            for name in "pd"
        )
        prefill_parts, decode_parts = (
            engine_parts(config, MemoryTransport(hub), self.clock, runner) for config in configs
        )
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
            request_of(f"{COORDINATOR}/{name}", prompt, self.clock, prefill_only=False, **fields),
            COORDINATOR,
            self.producer.endpoint.agent_id,
            self.clock.now,
            answers.append,
            local_prefill_tokens=local_prefill_tokens,
        )
        self.consumer.reserve(self.decode, entry, self.clock.now)
        return answers

    def start(self, name: str, prompt: list[int], ticket: KvTicket | None, **fields: Any) -> None:
        asked = request_of(name, prompt, self.clock, prefill_only=True, **fields)
        self.producer.start(self.prefill, asked, ticket, self.clock.now)

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
        assert_unused(self.prefill, self.producer.status)
        assert_unused(self.decode, self.consumer.status)


def ticket_of(answers: list[Granted | SplitserveError]) -> KvTicket:
    """The ticket of a reservation that was granted at once."""
    assert len(answers) == 1
    assert isinstance(answers[0], Granted)
    assert answers[0].ticket is not None
    return answers[0].ticket


def run(pair: ConnectorPair, name: str, prompt: list[int], rounds: int = 40) -> list[int]:
    pair.start(name, prompt, ticket_of(pair.reserve(name, prompt)))
    for _ in range(rounds):
        pair.round()
    return pair.tokens(name)
