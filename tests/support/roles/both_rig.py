"""Engines with both ends of the transfer, connected both ways and stepped by hand: no gRPC, a clock that tests set."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from decode_worker.kv_consumer import KvConsumer, Outputs
from decode_worker.requests import Granted, WaitingReservation
from kv_transfer.handoff.messages import KvTicket
from kv_transfer.transports.transport import PollResult
from prefill_worker.kv_producer import FirstTokenReady, KvProducer, PrefillEvent, engine_id
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import SplitserveError
from splitserve.generation.output_delta import output_of
from splitserve.v1 import decode_pb2
from tests.support.engine.connector_pair import (
    COORDINATOR,
    MAX_TOKENS,
    Clock,
    assert_unused,
    engine_config,
    engine_parts,
    request_of,
    ticket_of,
)
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.transfer.memory_transport import MemoryHub, MemoryTransport
from worker.connector import PairedConnector


class CountingTransport(MemoryTransport):
    """Counts its polls."""

    polls = 0

    def poll(self) -> PollResult:
        self.polls += 1
        return super().poll()


class BothNode:
    """The engine thread of one worker of role both."""

    def __init__(self, name: str, engine: EngineConfig, hub: MemoryHub, clock: Clock, epoch: int) -> None:
        self.name, self.clock = name, clock
        self.events: dict[str, list[PrefillEvent]] = defaultdict(list)
        self.outputs: dict[str, list[decode_pb2.SequenceOutput]] = defaultdict(list)
        config = WorkerConfig(worker_id=name, model="simulated", engine=engine)
        self.transport = CountingTransport(hub)
        parts = engine_parts(config, self.transport, clock)
        self.core = parts.core
        self.core.keep_prompt_room(True)
        self.idle = 0
        self.producer = KvProducer(parts, self._on_events, self._on_idle)
        self.consumer = KvConsumer(parts, epoch, self._on_outputs, self._on_idle, polls=self.producer.polls)
        self.connector = PairedConnector(parts, self.producer, self.consumer, self._on_idle)

    @property
    def agent_id(self) -> str:
        return self.connector.endpoint.agent_id

    def _on_idle(self) -> None:
        self.idle += 1

    def _on_events(self, events: list[tuple[str, PrefillEvent]]) -> None:
        for name, event in events:
            self.events[name].append(event)

    def _on_outputs(self, outputs: Outputs) -> None:
        for coordinator, batch in outputs.items():
            self.outputs[coordinator] += [output_of(*row) for row in batch]

    def reserve(
        self,
        name: str,
        prompt: list[int],
        writer: str = "",
        local: int = 0,
        came_before_s: float = 0.0,
        **fields: Any,
    ) -> list[Granted | SplitserveError]:
        """The answers; empty while the reservation waits. `came_before_s`: how long the engine took to look at it."""
        answers: list[Granted | SplitserveError] = []
        asked = request_of(f"{COORDINATOR}/{name}", prompt, self.clock, prefill_only=False, **fields)
        entry = WaitingReservation(
            asked,
            COORDINATOR,
            writer,
            self.clock.now - came_before_s,
            answers.append,
            local_prefill_tokens=local,
        )
        self.consumer.reserve(self.core, entry, self.clock.now)
        return answers

    def start(
        self, name: str, prompt: list[int], ticket: KvTicket | None, number: int = 1, **fields: Any
    ) -> None:
        asked = request_of(engine_id(name, number), prompt, self.clock, prefill_only=True, **fields)
        self.producer.start(self.core, asked, ticket, self.clock.now)

    def round(self) -> None:
        """One iteration of the engine thread."""
        self.connector.before_step(self.core, self.clock.now)
        self.core.collect()
        self._deliver()
        if self.core.has_work():
            self.core.begin_step()
            self._deliver()
            self.core.finish_step()
        self._deliver()

    def _deliver(self) -> None:
        if (result := self.core.take_result()) is not None:
            self.connector.after_step(self.core, result, self.clock.now)

    def first_tokens(self, name: str, number: int = 1) -> list[int]:
        """What the prompt's call has been told."""
        events = self.events[engine_id(name, number)]
        return [
            token
            for event in events
            if isinstance(event, FirstTokenReady)
            for token in event.output.token_ids
        ]

    def streamed(self, name: str) -> list[int]:
        """The tokens that the coordinator's stream has brought."""
        outputs = [output for output in self.outputs[COORDINATOR] if output.request_id == name]
        return [token for output in outputs for token in output.delta.token_ids]

    def failures(self, name: str) -> list[str]:
        """The reasons with which a reservation has ended."""
        outputs = [output for output in self.outputs[COORDINATOR] if output.request_id == name]
        return [output.failure.reason for output in outputs if output.HasField("failure")]

    def assert_empty(self) -> None:
        assert_unused(self.core, self.connector.status)


class BothRig:
    """Two workers of role both, A and B, each connected to the other."""

    def __init__(self, num_blocks: int = 64, max_step_tokens: int = 32, **engine: Any) -> None:
        self.clock = Clock()
        hub, config = MemoryHub(), engine_config(num_blocks, max_step_tokens, **engine)
        self.a = BothNode("a", config, hub, self.clock, 77)
        self.b = BothNode("b", config, hub, self.clock, 78)
        self.a.producer.connect(self.b.connector.endpoint)
        self.b.producer.connect(self.a.connector.endpoint)

    def run(self, rounds: int = 60) -> None:
        for _ in range(rounds):
            self.a.round()
            self.b.round()

    def hand_off(self, sender: BothNode, receiver: BothNode, name: str, prompt: list[int]) -> KvTicket:
        """Reserves at the one and starts the prompt at the other."""
        ticket = ticket_of(receiver.reserve(name, prompt, sender.agent_id))
        sender.start(name, prompt, ticket)
        return ticket

    def assert_empty(self) -> None:
        self.a.assert_empty()
        self.b.assert_empty()


def answer(sender: BothNode, receiver: BothNode, name: str) -> list[int]:
    """The tokens of an answer whose prompt the one computed and the other went on with."""
    return sender.first_tokens(name) + receiver.streamed(name)


def expected(prompt: list[int]) -> list[int]:
    """What the simulated model answers."""
    return expected_tokens(prompt, MAX_TOKENS)
