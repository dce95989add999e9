"""One attempt against scripted workers: its states in any order of their messages, and its clean-up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from coordinator.attempt import Attempt, AttemptState
from coordinator.request.state import RequestEstimate, RequestState
from coordinator.request_events import RequestEvents
from coordinator.telemetry.request_stats import RequestStats
from coordinator.workers.client import BackgroundTasks
from coordinator.workers.output_stream import OutputCollector, WorkerEvent, WorkerFailed
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.errors import ResourceExhaustedError, SplitserveError, UnavailableError
from splitserve.generation.output_delta import News, news_of
from splitserve.v1 import decode_pb2, generation_pb2, kv_transfer_pb2, prefill_pb2, registry_pb2, scaling_pb2
from tests.support.clients.inference_requests import inference_request
from tests.support.cluster.registrations import registration
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(10)
TICKET = decode_pb2.ReserveResponse(ticket=kv_transfer_pb2.KvTicket(cached_tokens=2))
LOST = UnavailableError("went away", reason="WORKER_LOST")
LENGTH = generation_pb2.FINISH_REASON_LENGTH


class ScriptedClient:
    """A WorkerClient whose worker sends what the test puts into the collector."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.collector: OutputCollector | None = None
        self.reserve_answer: decode_pb2.ReserveResponse | SplitserveError = TICKET
        self.aborts: list[bool] = []
        self.prefills = 0

    @contextmanager
    def attached(self, attempt_id: str, collector: OutputCollector, *, decodes: bool) -> Iterator[None]:
        self.collector = collector
        yield
        self.collector = None

    async def reserve(self, request: Any, timeout_s: float) -> decode_pb2.ReserveResponse:
        if isinstance(self.reserve_answer, SplitserveError):
            raise self.reserve_answer
        return self.reserve_answer

    def prefill(
        self, request: Any, timeout_s: float, collector: OutputCollector, background: BackgroundTasks
    ) -> Callable[[], object]:
        self.prefills += 1
        return lambda: None

    async def abort(self, attempt_id: str, no_writer: bool, deadline_s: float) -> None:
        self.aborts.append(no_writer)

    def say(self, event: WorkerEvent) -> None:
        assert self.collector is not None
        self.collector.put(event)


class Rig:
    """An attempt at a request for up to 8 tokens."""

    def __init__(self, background: BackgroundTasks, with_decode: bool = True) -> None:
        registry = Registry(1.0)
        prefill = registry.register(registration("p", registry_pb2.ROLE_PREFILL), 0.0)
        decode = registry.register(registration("d", registry_pb2.ROLE_DECODE), 0.0)
        self.events_seen, self.stats = list[str](), RequestStats()
        self.events = RequestEvents(RequestState(inference_request(), RequestEstimate(8.0, 3.0)))
        self.events.arrived(self.stats)
        self.events.control = Decoded(self.events_seen)
        self.events.routed(prefill, decode if with_decode else None, 0, time.monotonic())
        self.prefill, self.decode = ScriptedClient(prefill), ScriptedClient(decode)
        decode_client: Any = self.decode if with_decode else None
        prefill_client: Any = self.prefill
        self.attempt = Attempt(self.events, prefill_client, decode_client, background)

    async def start(self) -> None:
        await self.attempt.reserve()
        self.attempt.start_prefill()

    async def read(self) -> list[int]:
        delta = await self.attempt.next_delta()
        assert delta is not None
        return [delta.first_position, len(delta.token_ids)]

    @property
    def state(self) -> AttemptState:
        return self.attempt.state


class Decoded:
    """A RequestControl that records the end of decode's part."""

    def __init__(self, events_seen: list[str]) -> None:
        self._events_seen = events_seen

    def output_sent(self, tokens: int) -> None:
        """Output is not recorded."""

    def decoded(self) -> None:
        self._events_seen.append("decoded")

    def ended(self, error: BaseException | None) -> None:
        """The end is not recorded."""


@asynccontextmanager
async def rig(with_decode: bool = True) -> AsyncIterator[Rig]:
    background = BackgroundTasks()
    made = Rig(background, with_decode)
    yield made
    await background.close(1.0)


def delta(position: int, count: int = 1, finish: int = 0) -> generation_pb2.OutputDelta:
    made = generation_pb2.OutputDelta(first_position=position, token_ids=[7] * count)
    made.finish_reason = finish  # type: ignore[assignment]
    return made


def first(finish: int = 0) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(delta=delta(0, finish=finish), compute_ms=5.0)


def output(position: int, finish: int = 0, **fields: Any) -> News:
    return news_of(decode_pb2.SequenceOutput(delta=delta(position, finish=finish), **fields))


HANDOFF = prefill_pb2.HandoffDone(written_bytes=10, transfer_ms=3.0)
ADMITTED = decode_pb2.SequenceOutput(admitted=True)


async def test_the_usual_order() -> None:
    async with rig() as one:
        await one.start()
        assert one.state is AttemptState.PREFILLING
        one.prefill.say(first())
        assert await one.read() == [0, 1]
        assert one.state is AttemptState.TRANSFERRING
        one.prefill.say(HANDOFF)
        one.decode.say(ADMITTED)
        one.decode.say(output(1, admit_ms=2.0))
        assert await one.read() == [1, 1]
        assert one.state is AttemptState.REPORTED
        one.decode.say(output(2, LENGTH))
        assert one.events_seen == ["decoded"]
        assert await one.read() == [2, 1]
        assert one.state is AttemptState.FINISHED
        assert await one.attempt.next_delta() is None
        await one.attempt.settle()
        one.attempt.close()
        report = one.events.state.attempt.report
        assert (report.decode_worker, report.transfer_bytes, report.decode_admit_ms) == ("d", 10, 2.0)
    assert one.decode.aborts == []


async def test_output_that_overtakes_the_first_token_waits_for_it_and_comes_with_it() -> None:
    async with rig() as one:
        await one.start()
        one.decode.say(output(1))
        reading = asyncio.create_task(one.read())
        await settled(lambda: one.state is AttemptState.OVERTAKEN)
        assert not reading.done()
        one.prefill.say(first())
        assert await reading == [0, 2]
        assert one.state is AttemptState.DECODING
        one.attempt.close()
    assert one.decode.aborts == [False]


async def test_a_finished_answer_waits_for_the_report_on_the_transfer() -> None:
    async with rig() as one:
        await one.start()
        one.prefill.say(first())
        one.decode.say(output(1, LENGTH))
        assert await one.read() == [0, 2]
        assert one.state is AttemptState.SETTLING
        settling = asyncio.create_task(one.attempt.settle())
        await asyncio.sleep(0)
        one.prefill.say(HANDOFF)
        await settling
        assert one.state is AttemptState.FINISHED
        assert one.events.state.attempt.report.transport
        one.attempt.close()
    assert one.decode.aborts == []


async def test_a_prefill_worker_that_is_lost_while_decode_goes_on_does_not_matter() -> None:
    async with rig() as one:
        await one.start()
        one.prefill.say(first())
        one.decode.say(output(1))
        assert await one.read() == [0, 2]
        one.prefill.say(WorkerFailed(one.prefill.worker.key, LOST))
        one.decode.say(output(2, LENGTH))
        assert await one.read() == [2, 1]
        assert one.state is AttemptState.FINISHED
        one.attempt.close()


@pytest.mark.parametrize("early", [True, False])
async def test_a_failure_is_raised_after_the_output_before_it(early: bool) -> None:
    async with rig() as one:
        await one.start()
        if not early:
            one.prefill.say(first())
        one.decode.say(WorkerFailed(one.decode.worker.key, LOST))
        if not early:
            assert await one.read() == [0, 1]
        with pytest.raises(UnavailableError):
            await one.attempt.next_delta()
        assert one.state is AttemptState.FAILED
        assert one.events.state.attempt.suspect == one.decode.worker.key
        one.attempt.close()
    assert one.decode.aborts == [False]


async def test_a_first_token_that_is_the_last_aborts_decode() -> None:
    async with rig() as one:
        await one.start()
        one.prefill.say(first(LENGTH))
        one.prefill.say(HANDOFF)
        one.decode.say(ADMITTED)
        assert await one.read() == [0, 1]
        assert one.state is AttemptState.ENDED_AT_PREFILL
        assert await one.attempt.next_delta() is None
        await one.attempt.settle()
        one.attempt.close()
    assert one.decode.aborts == [True]


async def test_no_decode_worker_for_one_token() -> None:
    async with rig(with_decode=False) as one:
        await one.start()
        one.prefill.say(first(LENGTH))
        assert await one.read() == [0, 1]
        assert one.events.state.attempt.all_workers_responded
        one.attempt.close()
    assert one.decode.aborts == []


async def test_decode_computes_the_prompt_itself() -> None:
    async with rig() as one:
        one.decode.reserve_answer = decode_pb2.ReserveResponse(wait_ms=4.0)
        await one.start()
        assert one.state is AttemptState.LOCAL
        waited = one.stats.of("words").phases[scaling_pb2.PHASE_RESERVE].cold
        assert (waited.total, waited.sum_s) == (1, 0.0), "its wait is part of the local prefill's"
        assert one.events.state.attempt.report.reserve_ms == 0.0
        one.prefill.say(WorkerFailed(one.prefill.worker.key, LOST))
        one.decode.say(output(0, local_prefill=decode_pb2.LocalPrefill(compute_ms=5.0)))
        assert await one.read() == [0, 1]
        one.decode.say(output(1, LENGTH))
        assert await one.read() == [1, 1]
        assert one.state is AttemptState.FINISHED
        assert one.events.state.attempt.responsive_parts == [(one.decode.worker.key,)]
        one.attempt.close()
    assert (one.prefill.prefills, one.decode.aborts) == (0, [])


@pytest.mark.parametrize(
    ("error", "aborts"), [(ResourceExhaustedError("full"), []), (UnavailableError("gone"), [True])]
)
async def test_only_a_refusal_leaves_nothing_to_abort(error: SplitserveError, aborts: list[bool]) -> None:
    async with rig() as one:
        one.decode.reserve_answer = error
        with pytest.raises(type(error)):
            await one.attempt.reserve()
        one.attempt.close()
    assert one.decode.aborts == aborts


async def test_a_worker_that_says_what_it_must_not_fails_the_attempt() -> None:
    async with rig() as one:
        await one.start()
        one.prefill.say(first())
        one.prefill.say(first())
        with pytest.raises(SplitserveError) as caught:
            await one.attempt.next_delta()
        assert caught.value.reason == "ILLEGAL_TRANSITION"
        one.attempt.close()


async def test_what_comes_after_the_end_is_ignored() -> None:
    async with rig() as one:
        await one.start()
        one.prefill.say(first())
        one.decode.say(output(1, LENGTH))
        assert await one.read() == [0, 2]
        one.decode.say(output(2))
        one.prefill.say(HANDOFF)
        await one.attempt.settle()
        assert await one.attempt.next_delta() is None
        one.attempt.close()


async def test_a_worker_of_role_both_that_serves_alone_fails_the_attempt_when_it_is_lost() -> None:
    """Its loss is not that of a prefill worker that is no longer needed, although its key is both."""
    background = BackgroundTasks()
    worker = Registry(1.0).register(registration("n", registry_pb2.ROLE_PREFILL), 0.0)
    one = Rig(background)
    one.events.routed(worker, worker, 0, time.monotonic())
    client: Any = ScriptedClient(worker)
    client.reserve_answer = decode_pb2.ReserveResponse()
    one.attempt = Attempt(one.events, client, client, background)
    await one.start()
    assert one.state is AttemptState.LOCAL
    client.say(output(0))
    assert await one.read() == [0, 1]
    client.say(WorkerFailed(worker.key, LOST))
    with pytest.raises(UnavailableError, match="went away"):
        async with asyncio.timeout(PATIENCE_S):
            await one.read()
    assert one.state is AttemptState.FAILED
    assert one.events.state.attempt.suspect == worker.key
    one.attempt.close()
    await background.close(1.0)
