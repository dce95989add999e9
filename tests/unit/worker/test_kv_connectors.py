"""KvProducer and KvConsumer in one process: simulated engines, memory transport, no gRPC."""

from __future__ import annotations

from typing import Any

import pytest

from decode_worker.requests import Granted
from engine.runner.simulated_runner import SimulatedRunner
from prefill_worker.kv_producer import Failed, FirstTokenReady, HandedOff, PrefillEvent
from splitserve.errors import SplitserveError
from splitserve.v1 import generation_pb2
from tests.support.engine.connector_pair import COORDINATOR, MAX_TOKENS, run, ticket_of
from tests.support.engine.connector_pair import ConnectorPair as Pair
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.transfer.memory_transport import MemoryTransport


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"], autouse=True)
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedRunner, "overlaps", request.param)


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 32, 33, 100])
def test_a_handoff_gives_the_engine_s_own_tokens(length: int, pair: Pair) -> None:
    prompt = [(7 * n) % 250 for n in range(length)]
    expected = expected_tokens(prompt, MAX_TOKENS)
    assert run(pair, "a", prompt) == expected
    assert run(pair, "again", prompt) == expected, "with everything cached on both sides"
    handed = [event for event in pair.prefill_events["a"] if isinstance(event, HandedOff)]
    assert len(handed) == 1
    last = pair.decode_outputs[COORDINATOR][-1]
    assert last.delta.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    pair.assert_empty()


@pytest.mark.parametrize("rounds_before", range(8))
def test_abort_in_every_phase_frees_everything(rounds_before: int, pair: Pair) -> None:
    prompt = [n % 250 for n in range(100)]
    pair.start("a", prompt, ticket_of(pair.reserve("a", prompt)))
    for _ in range(rounds_before):
        pair.round()
    pair.producer.end(pair.prefill, "a", None, pair.clock.now)
    pair.consumer.abort(pair.decode, f"{COORDINATOR}/a", COORDINATOR, False, pair.clock.now)
    for _ in range(20):
        pair.round()
    pair.assert_empty()
    assert run(pair, "b", prompt) == expected_tokens(prompt, MAX_TOKENS)


def test_reservations_wait_for_blocks_and_are_served_in_turn() -> None:
    pair = Pair(num_blocks=16)
    prompts = [[n + 10 * k for n in range(60)] for k in range(3)]
    answers = [pair.reserve(str(k), prompt) for k, prompt in enumerate(prompts)]
    assert [len(answer) for answer in answers] == [1, 0, 0]
    for k, prompt in enumerate(prompts):
        pair.start(str(k), prompt, ticket_of(answers[k]))
        for _ in range(40):
            pair.round()
        assert pair.tokens(str(k)) == expected_tokens(prompt, MAX_TOKENS)
    pair.assert_empty()


def granted_locally(answers: list[Granted | SplitserveError]) -> bool:
    (answer,) = answers
    assert isinstance(answer, Granted)
    return answer.ticket is None


@pytest.mark.parametrize("length", [1, 8, 33, 100])
def test_a_prompt_computed_on_the_decode_worker_gives_the_same_tokens(length: int, pair: Pair) -> None:
    prompt = [(7 * n) % 250 for n in range(length)]
    assert granted_locally(pair.reserve("a", prompt, local_prefill_tokens=length))
    for _ in range(40):
        pair.round()
    assert pair.tokens("a") == expected_tokens(prompt, MAX_TOKENS)
    outputs = pair.decode_outputs[COORDINATOR]
    assert [output.HasField("local_prefill") for output in outputs] == [True] + [False] * (MAX_TOKENS - 1)
    assert not any(output.admitted or output.HasField("admit_ms") for output in outputs)
    pair.assert_empty()


def test_only_what_the_cache_lacks_counts_for_a_local_prefill(pair: Pair) -> None:
    prompt = [(7 * n) % 250 for n in range(100)]
    assert not granted_locally(pair.reserve("long", prompt, local_prefill_tokens=99))
    pair.consumer.abort(pair.decode, f"{COORDINATOR}/long", COORDINATOR, True, pair.clock.now)
    run(pair, "first", prompt)
    assert granted_locally(pair.reserve("a", prompt, local_prefill_tokens=8))
    for _ in range(20):
        pair.round()
    assert pair.tokens("a") == expected_tokens(prompt, MAX_TOKENS)
    reports = [o.local_prefill for o in pair.decode_outputs[COORDINATOR] if o.HasField("local_prefill")]
    assert [report.cached_tokens for report in reports] == [96]
    pair.assert_empty()


@pytest.mark.parametrize("rounds_before", range(6))
@pytest.mark.parametrize("lost", [False, True])
def test_a_local_prefill_can_be_aborted_at_any_time(rounds_before: int, lost: bool, pair: Pair) -> None:
    pair.reserve("a", [n % 250 for n in range(100)], local_prefill_tokens=100)
    for _ in range(rounds_before):
        pair.round()
    if lost:
        pair.consumer.keep_requests(pair.decode, COORDINATOR, frozenset(), pair.clock.now)
    else:
        assert pair.consumer.abort(pair.decode, f"{COORDINATOR}/a", COORDINATOR, True, pair.clock.now), (
            "it was alive"
        )
    pair.round()
    pair.assert_empty()


def test_a_lost_coordinator_frees_its_requests(pair: Pair) -> None:
    prompt = list(range(50))
    pair.start("a", prompt, ticket_of(pair.reserve("a", prompt)))
    for _ in range(4):
        pair.round()
    pair.consumer.keep_requests(pair.decode, COORDINATOR, frozenset(), pair.clock.now)
    pair.producer.end(pair.prefill, "a", None, pair.clock.now)
    for _ in range(10):
        pair.round()
    pair.assert_empty()


def test_requests_that_a_returning_coordinator_does_not_name_are_ended(pair: Pair) -> None:
    prompt = list(range(50))
    for name in ("kept", "dropped"):
        pair.start(name, prompt, ticket_of(pair.reserve(name, prompt)))
    pair.reserve("local", prompt, local_prefill_tokens=50)
    for _ in range(4):
        pair.round()
    named = {"kept", "never heard of"}
    live = pair.consumer.keep_requests(pair.decode, COORDINATOR, named, pair.clock.now)
    assert live == {"kept"}
    assert pair.consumer.keep_requests(pair.decode, "another", set(), pair.clock.now) == frozenset()
    pair.producer.end(pair.prefill, "dropped", None, pair.clock.now)
    for _ in range(30):
        pair.round()
    assert pair.tokens("kept") == expected_tokens(prompt, MAX_TOKENS)
    pair.assert_empty()


def test_a_writer_that_never_comes_is_outlasted_by_the_quarantine(pair: Pair) -> None:
    pair.reserve("a", list(range(50)))
    pair.clock.now += 200  # past the ticket
    pair.round()
    failure = pair.decode_outputs[COORDINATOR][-1].failure
    assert failure.reason == "TICKET_EXPIRED"
    assert pair.decode.load().quarantined_blocks > 0
    pair.clock.now += 200
    pair.round()
    pair.assert_empty()


def test_what_can_never_fit_is_refused_at_once() -> None:
    pair = Pair(num_blocks=4)
    answers = pair.reserve("a", list(range(100)))
    assert isinstance(answers[0], SplitserveError)
    assert answers[0].reason == "KV_POOL_TOO_SMALL"


def test_without_a_ticket_the_first_token_is_all(pair: Pair) -> None:
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


def test_a_first_token_leaves_before_the_last_writes_are_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    journal: list[str] = []
    pair = Pair()
    write = MemoryTransport.write

    def noted_write(transport: MemoryTransport, *parts: Any) -> int:
        journal.append("write")
        return write(transport, *parts)

    monkeypatch.setattr(MemoryTransport, "write", noted_write)

    def send(_request_id: str, event: PrefillEvent) -> None:
        if isinstance(event, FirstTokenReady):
            journal.append("token")

    pair.on_prefill = send
    while not pair.producer.status.usable_agents:
        pair.round()  # the lane is measured by writes
    journal.clear()
    prompt = list(range(20))
    assert run(pair, "a", prompt) == expected_tokens(prompt, MAX_TOKENS)
    assert journal == ["token", "write"]


def test_a_status_is_never_changed_and_idleness_is_reported(pair: Pair) -> None:
    prompt = list(range(20))
    before = pair.consumer.status
    answers = pair.reserve("a", prompt)
    reserved = pair.consumer.status
    assert (before.in_progress, reserved.in_progress) == (0, 1), "it shows before the caller can know"
    pair.start("a", prompt, ticket_of(answers))
    for _ in range(40):
        pair.round()
    assert pair.idle == ["p", "d"]
    assert (before.in_progress, reserved.in_progress) == (0, 1)
    assert (pair.producer.status.handoffs_completed, pair.consumer.status.handoffs_completed) == (1, 1)
    assert pair.producer.status.handoff_bytes > 0
