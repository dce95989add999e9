"""What a coordinator learns from a fetch: from how it ended, what it waited for, and the holder's word of its write."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.background_tasks import BackgroundTasks
from coordinator.peer_fetch import fetcher as fetcher_module
from coordinator.peer_fetch.fetch_times import FetchTimes
from coordinator.peer_fetch.fetcher import PrefixFetcher
from coordinator.peer_fetch.hot_prefixes import Prefix
from coordinator.peer_fetch.policy import FetchPlan
from coordinator.peer_fetch.prefix_fetch import FetchParts, too_slow
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.v1 import prefill_pb2, registry_pb2
from tests.support.cluster.registrations import BLOCK_SIZE, registration

pytestmark = pytest.mark.timeout(10)
LANE_S = 0.02
"""Of what a fetch is to bring."""
BYTES = 10_000_000
"""At 1 GB/s 10 ms: half of that was there before."""
PREFIX = Prefix("words", (1,) * 8 * BLOCK_SIZE, b"", None)


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = Registry(60.0)
        for name in ("holder", "taker"):
            request = registration(name, registry_pb2.POOL_PREFILL)
            request.neutral = True
            self.registry.register(request, 0.0)
        self.report()
        clients: Any = Clients()
        self.fetcher = PrefixFetcher(CoordinatorConfig(), self.registry, clients, BackgroundTasks())
        self.times = self.fetcher.times
        self.written: list[prefill_pb2.HandoffDone] = []
        monkeypatch.setattr(fetcher_module, "fetch_prefix", self.fetch_prefix)

    async def fetch_prefix(self, *parts: Any, on_written: Any, **more: Any) -> int:
        for done in self.written:
            on_written(done)
        return 4

    def report(self, **load: Any) -> None:
        agent_id = self.worker("taker").agent_id
        lane = registry_pb2.LaneReport(agent_id=agent_id, gb_per_second=1.0)
        self.registry.report(
            registry_pb2.ReportRequest(
                worker_id="holder",
                epoch=1,
                connected_agent_ids=[agent_id],
                lanes=[lane],
                load=registry_pb2.WorkerLoad(**load),
            ),
            1.0,
        )

    def worker(self, name: str) -> Worker:
        found = self.registry.get((name, 1))
        assert found is not None
        return found

    @property
    def pair(self) -> Any:
        return self.worker("holder").key, self.worker("taker").key

    def plan(self, wait_s: float = 0.0) -> FetchPlan:
        holder, taker = self.worker("holder"), self.worker("taker")
        tokens = len(PREFIX.token_ids)
        return FetchPlan(holder, taker, tokens, 0, LANE_S, 1.5, wait_s, 0.05, 1.0)

    async def fetch(self, plan: FetchPlan) -> None:
        under_way = self.fetcher._begin(plan, PREFIX, (), 1.0, FetchParts())
        await under_way.wait(1.0)


class Clients:
    def client_for(self, worker: Worker) -> Worker:
        return worker


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def learnt(rig: Rig) -> float:
    """The pace after the writes."""
    return rig.times.pace(rig.pair, 0.0)


async def test_a_write_is_taken_over_the_bytes_that_were_written(rig: Rig) -> None:
    rig.written = [prefill_pb2.HandoffDone(written_bytes=BYTES, transfer_ms=20.0)]
    await rig.fetch(rig.plan())
    assert learnt(rig) == pytest.approx(2.0)


async def test_a_write_of_nothing_says_nothing(rig: Rig) -> None:
    rig.written = [prefill_pb2.HandoffDone(transfer_ms=20.0)]
    await rig.fetch(rig.plan())
    assert learnt(rig) == 1.0


@pytest.mark.parametrize("before", [True, False])
async def test_the_write_of_a_holder_that_computes_says_nothing(rig: Rig, before: bool) -> None:
    rig.written = [prefill_pb2.HandoffDone(written_bytes=BYTES, transfer_ms=30.0)]
    plan = rig.plan()
    rig.report(running_requests=1, decode_step_ms=30.0)
    if before:
        plan = rig.plan()
        rig.report()
    await rig.fetch(plan)
    assert learnt(rig) == 1.0


async def test_seeds_give_way_and_teach_nothing(rig: Rig) -> None:
    rig.written = [prefill_pb2.HandoffDone(written_bytes=BYTES, transfer_ms=20.0)]
    await rig.fetcher.seed(rig.worker("holder"), rig.worker("taker"), PREFIX, (), 1.0)
    assert learnt(rig) == 1.0


def calls_s(times: FetchTimes, rig: Rig) -> float:
    return times.calls_s(rig.pair, 0.0)


def test_a_fetch_that_the_taker_kept_waiting_throughout_says_nothing_of_the_pair(rig: Rig) -> None:
    before_s = calls_s(rig.times, rig)
    rig.fetcher._count(rig.plan(), 0, FetchParts(1.0), too_slow(1.0))
    assert calls_s(rig.times, rig) == before_s
    assert not rig.fetcher._resting
    rig.fetcher._count(rig.plan(), 0, FetchParts(1.0, reserve_s=0.004), too_slow(1.0))
    assert calls_s(rig.times, rig) > before_s
    assert rig.fetcher._resting
    assert rig.fetcher.counts.outcomes["failed"] == 2


def test_what_the_holder_was_waited_for_is_not_taken_for_a_call_where_the_taker_was_late(rig: Rig) -> None:
    """15 ms were to be waited for the holder, as the taker had no step; it was waited for 32 ms all the same."""
    taken: list[float] = []
    rig.times.record = lambda pair, lane_s, took_s, now: taken.append(took_s)  # type: ignore[method-assign]
    plan = rig.plan(wait_s=0.015)
    parts = FetchParts(0.1, reserve_s=0.04, waited_s=0.032)
    rig.fetcher._count(plan, plan.tokens, parts, None)
    assert taken == [pytest.approx(0.1 - 0.015 - 0.03)]


def test_the_log_tells_the_pace_of_the_prediction(rig: Rig) -> None:
    logged: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fetcher_module, "log_event", lambda name, **fields: logged.append(fields))
        for at_s in (0.0, 1.0, 2.0):
            rig.times.record_write(rig.pair, 0.01, 0.03, at_s)
        rig.fetcher._count(rig.plan(), 0, FetchParts(0.1), None)
    assert [fields["pace"] for fields in logged] == [1.5]
