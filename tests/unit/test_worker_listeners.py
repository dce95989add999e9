"""Prefill and decode sides joined in one process: simulated engines, memory transport, no gRPC."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import pytest

from decode_worker.receive_listener import Outputs, ReceiveListener
from decode_worker.waiting_room import Granted, WaitingReservation
from engine.build import EngineParts, ServedAs
from engine.core import EngineCore
from engine.grammar import GrammarCompiler
from engine.simulated_runner import SimulatedRunner, expected_tokens
from engine.types import EngineRequest, SamplingParams, StopParams
from kv_transfer.memory_transport import MemoryHub, MemoryTransport
from kv_transfer.ticket import KvTicket
from prefill_worker.events import Failed, FirstTokenReady, HandedOff, PrefillEvent
from prefill_worker.push_listener import PushListener
from splitserve.config import EngineConfig, WorkerConfig
from splitserve.errors import SplitserveError
from splitserve.hf_tokenizer import load_tokenizer
from splitserve.v1 import generation_pb2
from tests.fakes.masked_wire import MaskedRunner

COORDINATOR = "c"
MAX_TOKENS = 12
FREE_TIME = {"simulated_prefill_token_s": 0.0, "simulated_step_s": 0.0, "simulated_sequence_s": 0.0}


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"], autouse=True)
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedRunner, "overlaps", request.param)


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Pair:
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
        self.decode_outputs: Outputs = defaultdict(list)
        prefill_parts, decode_parts = self._parts("p", engine, hub), self._parts("d", engine, hub)
        self.prefill, self.decode = prefill_parts.core, decode_parts.core
        self.pusher = PushListener(prefill_parts, self._on_prefill)
        self.receiver = ReceiveListener(decode_parts, 77, self._on_decode)
        self.pusher.connect(decode_parts.endpoint)

    def _parts(self, name: str, engine: EngineConfig, hub: MemoryHub) -> EngineParts:
        config = WorkerConfig(
            worker_id=name, model="simulated", engine=engine, transport="memory", verify_kv=self._verify_kv
        )
        runner = self._runner(engine)
        transport = MemoryTransport(hub)
        endpoint = transport.register_pool(runner.wire.memory)
        core = EngineCore(runner, engine, load_tokenizer("simulated"), self.clock)
        grammars = GrammarCompiler(load_tokenizer("simulated"), runner.facts)
        served = ServedAs("simulated", "simulated")
        return EngineParts(runner, core, grammars, transport, endpoint, served, config)

    def _on_prefill(self, events: list[tuple[str, PrefillEvent]]) -> None:
        for request_id, event in events:
            self.prefill_events[request_id].append(event)

    def _on_decode(self, outputs: Outputs) -> None:
        for coordinator, batch in outputs.items():
            self.decode_outputs[coordinator].extend(batch)

    def reserve(
        self, name: str, prompt: list[int], local_prefill_tokens: int = 0
    ) -> list[Granted | SplitserveError]:
        answers: list[Granted | SplitserveError] = []
        entry = WaitingReservation(
            self._request(f"{COORDINATOR}/{name}", prompt, prefill_only=False),
            COORDINATOR,
            "",
            self.clock.now,
            answers.append,
            local_prefill_tokens=local_prefill_tokens,
        )
        self.receiver.reserve(self.decode, entry)
        return answers

    def start(self, name: str, prompt: list[int], ticket: KvTicket | None) -> None:
        self.pusher.start(
            self.prefill, self._request(name, prompt, prefill_only=True), ticket, self.clock.now
        )

    def _request(self, name: str, prompt: list[int], *, prefill_only: bool) -> EngineRequest:
        stop = StopParams(max_tokens=MAX_TOKENS)
        deadline_s = self.clock.now + 300
        return EngineRequest(
            name, tuple(prompt), SamplingParams(), stop, deadline_s=deadline_s, prefill_only=prefill_only
        )

    def round(self) -> None:
        """One turn of both engine threads."""
        for core, listener in ((self.prefill, self.pusher), (self.decode, self.receiver)):
            listener.before_step(core, self.clock.now)
            if core.has_work():
                core.begin_step()
                self.deliver(core, listener)
                core.finish_step()
            if not core.result_can_wait:
                self.deliver(core, listener)

    def deliver(self, core: EngineCore, listener: PushListener | ReceiveListener) -> None:
        if (result := core.take_result()) is not None:
            listener.after_step(core, result, self.clock.now)

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
        assert self.pusher.transfers_in_flight == self.receiver.transfers_in_flight == 0
        assert self.receiver.live_requests == self.receiver.waiting_reservations == 0


def ticket_of(answers: list[Granted | SplitserveError]) -> KvTicket:
    assert len(answers) == 1
    assert isinstance(answers[0], Granted)
    return answers[0].ticket


def run(pair: Pair, name: str, prompt: list[int], rounds: int = 40) -> list[int]:
    pair.start(name, prompt, ticket_of(pair.reserve(name, prompt)))
    for _ in range(rounds):
        pair.round()
    return pair.tokens(name)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 32, 33, 100])
def test_a_handoff_gives_the_engine_s_own_tokens(length: int) -> None:
    pair = Pair()
    prompt = [(7 * n) % 250 for n in range(length)]
    expected = expected_tokens(prompt, MAX_TOKENS, 257)
    assert run(pair, "a", prompt) == expected
    assert run(pair, "again", prompt) == expected, "with everything cached on both sides"
    handed = [event for event in pair.prefill_events["a"] if isinstance(event, HandedOff)]
    assert len(handed) == 1
    last = pair.decode_outputs[COORDINATOR][-1]
    assert last.delta.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    pair.assert_empty()


@pytest.mark.parametrize("length", [1, 8, 9, 33, 100])
def test_kv_that_travels_in_wire_blocks_is_packed_before_and_unpacked_after(length: int) -> None:
    pair = Pair(runner=MaskedRunner, verify_kv="all")
    prompts = [[(7 * n + start) % 250 for n in range(length)] for start in (0, 0, 3)]
    prompts.append(prompts[0] + prompts[2])  # begins with what both sides hold already
    for number, prompt in enumerate(prompts):
        assert run(pair, str(number), prompt) == expected_tokens(prompt, MAX_TOKENS, 257)
    pair.assert_empty()


@pytest.mark.parametrize("rounds_before", range(8))
def test_abort_in_every_phase_frees_everything(rounds_before: int) -> None:
    pair = Pair()
    prompt = [n % 250 for n in range(100)]
    pair.start("a", prompt, ticket_of(pair.reserve("a", prompt)))
    for _ in range(rounds_before):
        pair.round()
    pair.pusher.end(pair.prefill, "a", None, pair.clock.now)
    pair.receiver.abort(pair.decode, f"{COORDINATOR}/a", COORDINATOR, False, pair.clock.now)
    for _ in range(20):
        pair.round()
    pair.assert_empty()
    assert run(pair, "b", prompt) == expected_tokens(prompt, MAX_TOKENS, 257)


def test_reservations_wait_for_room_and_are_served_in_turn() -> None:
    pair = Pair(num_blocks=16)
    prompts = [[n + 10 * k for n in range(60)] for k in range(3)]
    answers = [pair.reserve(str(k), prompt) for k, prompt in enumerate(prompts)]
    assert [len(answer) for answer in answers] == [1, 0, 0]
    for k, prompt in enumerate(prompts):
        pair.start(str(k), prompt, ticket_of(answers[k]))
        for _ in range(40):
            pair.round()
        assert pair.tokens(str(k)) == expected_tokens(prompt, MAX_TOKENS, 257)
    pair.assert_empty()


def granted_locally(answers: list[Granted | SplitserveError]) -> bool:
    (answer,) = answers
    assert isinstance(answer, Granted)
    return answer.ticket is None


@pytest.mark.parametrize("length", [1, 8, 33, 100])
def test_a_prompt_computed_on_the_decode_worker_gives_the_same_tokens(length: int) -> None:
    pair = Pair()
    prompt = [(7 * n) % 250 for n in range(length)]
    assert granted_locally(pair.reserve("a", prompt, local_prefill_tokens=length))
    for _ in range(40):
        pair.round()
    assert pair.tokens("a") == expected_tokens(prompt, MAX_TOKENS, 257)
    outputs = pair.decode_outputs[COORDINATOR]
    assert [output.HasField("local_prefill") for output in outputs] == [True] + [False] * (MAX_TOKENS - 1)
    assert not any(output.admitted or output.HasField("admit_ms") for output in outputs)
    pair.assert_empty()


def test_only_what_the_cache_lacks_counts_for_a_local_prefill() -> None:
    pair = Pair()
    prompt = [(7 * n) % 250 for n in range(100)]
    assert not granted_locally(pair.reserve("long", prompt, local_prefill_tokens=99))
    pair.receiver.abort(pair.decode, f"{COORDINATOR}/long", COORDINATOR, True, pair.clock.now)
    run(pair, "first", prompt)
    assert granted_locally(pair.reserve("a", prompt, local_prefill_tokens=8))
    for _ in range(20):
        pair.round()
    assert pair.tokens("a") == expected_tokens(prompt, MAX_TOKENS, 257)
    reports = [o.local_prefill for o in pair.decode_outputs[COORDINATOR] if o.HasField("local_prefill")]
    assert [report.cached_tokens for report in reports] == [96]
    pair.assert_empty()


@pytest.mark.parametrize("rounds_before", range(6))
@pytest.mark.parametrize("lost", [False, True])
def test_a_local_prefill_can_be_aborted_at_any_time(rounds_before: int, lost: bool) -> None:
    pair = Pair()
    pair.reserve("a", [n % 250 for n in range(100)], local_prefill_tokens=100)
    for _ in range(rounds_before):
        pair.round()
    if lost:
        pair.receiver.coordinator_lost(pair.decode, COORDINATOR, pair.clock.now)
    else:
        assert pair.receiver.abort(pair.decode, f"{COORDINATOR}/a", COORDINATOR, True, pair.clock.now), (
            "it was alive"
        )
    pair.round()
    pair.assert_empty()


def test_a_lost_coordinator_frees_its_requests() -> None:
    pair = Pair()
    prompt = list(range(50))
    pair.start("a", prompt, ticket_of(pair.reserve("a", prompt)))
    for _ in range(4):
        pair.round()
    pair.receiver.coordinator_lost(pair.decode, COORDINATOR, pair.clock.now)
    pair.pusher.end(pair.prefill, "a", None, pair.clock.now)
    for _ in range(10):
        pair.round()
    pair.assert_empty()


def test_a_writer_that_never_comes_is_outlasted_by_the_quarantine() -> None:
    pair = Pair()
    pair.reserve("a", list(range(50)))
    pair.clock.now += 200  # past the ticket
    pair.round()
    failure = pair.decode_outputs[COORDINATOR][-1].failure
    assert failure.reason == "TICKET_EXPIRED"
    assert pair.decode.load().quarantined_blocks > 0
    pair.clock.now += 200
    pair.round()
    pair.assert_empty()


def test_what_can_never_fit_is_answered_at_once() -> None:
    pair = Pair(num_blocks=4)
    answers = pair.reserve("a", list(range(100)))
    assert isinstance(answers[0], SplitserveError)
    assert answers[0].reason == "KV_POOL_TOO_SMALL"


def test_without_a_ticket_the_first_token_is_all() -> None:
    pair = Pair()
    prompt = list(range(20))
    pair.start("a", prompt, None)
    for _ in range(4):
        pair.round()
    events = pair.prefill_events["a"]
    assert len(events) == 1
    assert isinstance(events[0], FirstTokenReady)
    assert events[0].last
    assert not isinstance(events[0], Failed)
    pair.assert_empty()
