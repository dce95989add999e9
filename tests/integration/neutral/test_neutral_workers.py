"""Two neutral workers without a coordinator that routes: both services, both directions, and leanings that change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from engine.runner.simulated_runner import expected_tokens
from neutral_worker.service import UNKNOWN_LOGGED_EVERY_S
from splitserve.client.registry_client import MIN_CACHE_REPORT_INTERVAL_S
from splitserve.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    SplitserveError,
    UnavailableError,
)
from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import decode_pb2, registry_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from tests.support.cluster.streams import tokens
from tests.support.neutral.direct_requests import MAX_TOKENS, DirectWorker, direct_workers, hand_off
from tests.support.neutral.neutral_processes import NeutralProcesses, neutral_processes
from tests.support.neutral.scripted_registry import ScriptedRegistry
from tests.support.waiting import LEAST_TIMEOUT_S, SLACK_S

PREFILL, DECODE = registry_pb2.POOL_PREFILL, registry_pb2.POOL_DECODE
LONG_ANSWER = 100
"""Tokens of an answer that a drain finds under way: 2 s."""
LONG = 5000
"""Prompt tokens of handoffs that a worker's death ends: 10 s of computation."""
SOON_S = SLACK_S / 6
"""By when a change of leaning is in a report, though requests run all the time: it waits for none of them."""

# The registry of the shared workers runs in this process, and so in the loop of the module.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LEAST_TIMEOUT_S),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NeutralProcesses]:
    """Small pools, and a registry that tells each worker of itself as well."""
    log_dir = tmp_path_factory.mktemp("logs")
    options = ["--num-blocks", "96", "--simulated-step-s", "0.002"]
    async with neutral_processes(log_dir, "simulated", *options, own_peers=True) as workers:
        yield workers


async def one_of_each(a: DirectWorker, b: DirectWorker, name: str, seed: int) -> None:
    """An answer in each direction and one of each worker alone, all at once and under one id."""
    prompts = [tokens(60 + 7 * n, seed + n) for n in range(4)]
    answers = await asyncio.gather(
        hand_off(a, b, name, prompts[0]),
        hand_off(b, a, name, prompts[1]),
        a.local(f"{name}-alone", prompts[2]),
        b.local(f"{name}-alone", prompts[3]),
    )
    assert answers == [expected_tokens(prompt, MAX_TOKENS) for prompt in prompts]


async def lean(registry: ScriptedRegistry, name: str, pool: int) -> float:
    """Asks for a leaning; the seconds until a report has it."""
    member, began = registry.members[name], time.monotonic()
    registry.tell(member, pool)
    await registry.until(lambda: member.report.leaning == pool, f"{name} leans to {pool}")
    return next(at for at, leaning in reversed(member.leanings) if leaning == pool) - began


def moves(shared: NeutralProcesses) -> int:
    """How often worker a has changed its leaning."""
    return sum(event["event"] == "worker.leaning" for event in shared.members["a"].events())


async def test_answers_in_both_directions_and_locally_at_once(shared: NeutralProcesses) -> None:
    registry = shared.registry
    assert {name: member.registration.neutral for name, member in registry.members.items()} == {
        "a": True,
        "b": True,
    }
    assert registry.members["a"].registration.pool == registry.members["a"].report.leaning == PREFILL
    assert registry.members["b"].registration.pool == registry.members["b"].report.leaning == DECODE
    async with direct_workers(registry, "a", "b") as (a, b):
        await asyncio.gather(*(one_of_each(a, b, f"r{n}", 10 * n) for n in range(8)))
    await registry.assert_no_leaks()


async def test_leanings_change_under_load_and_no_request_fails(shared: NeutralProcesses) -> None:
    registry, over = shared.registry, asyncio.Event()

    async def load(a: DirectWorker, b: DirectWorker, lane: int) -> int:
        count = 0
        while not over.is_set():
            await one_of_each(a, b, f"l{lane}-{count}", 1000 * lane + 10 * count)
            count += 1
        return count

    async with direct_workers(registry, "a", "b") as (a, b):
        loads = [asyncio.create_task(load(a, b, lane)) for lane in range(1, 4)]
        took = []
        for turn in range(20):
            pools = (DECODE, PREFILL) if turn % 2 == 0 else (PREFILL, DECODE)
            for name, pool in zip(("a", "b"), pools, strict=True):
                took.append(await lean(registry, name, pool))
        over.set()
        assert sum(await asyncio.gather(*loads)) >= 3
    assert sorted(took)[len(took) // 2] < SOON_S, took
    events = [event for event in shared.members["a"].events() if event["event"] == "worker.leaning"]
    assert len(events) >= 20
    assert {(event["from"], event["to"]) for event in events} == {
        ("prefill", "decode"),
        ("decode", "prefill"),
    }
    await registry.assert_no_leaks()


async def test_a_storm_of_leanings_and_unknown_ones(shared: NeutralProcesses) -> None:
    """A value that no version knows changes nothing; of many the latest counts, and reports stay few."""
    registry, member = shared.registry, shared.registry.members["a"]
    await lean(registry, "a", PREFILL)
    seen, began_s = len(member.leanings), time.monotonic()
    # It starts at PREFILL and ends at DECODE; in between the worker leans to DECODE many times, so a report that says
    # so ends nothing: the worker's log counts how far it is.
    storm = [99 if turn % 3 == 2 else (DECODE, PREFILL)[turn % 2] for turn in range(301)] + [DECODE]
    known = [PREFILL] + [pool for pool in storm if pool != 99]
    changes = sum(after != before for before, after in pairwise(known))
    moved = moves(shared) + changes
    async with direct_workers(registry, "a", "b") as (a, b):
        answers = asyncio.create_task(one_of_each(a, b, "storm", 7))
        for pool in storm:
            registry.tell(member, pool)
        await registry.until(lambda: moves(shared) == moved, "the last of them has arrived")
        await registry.until(lambda: member.report.leaning == DECODE, "the latest counts")
        took_s, told = time.monotonic() - began_s, len(member.leanings) - seen
        registry.tell(member, 77)
        registry.tell(member, 0)
        await answers
        await one_of_each(a, b, "after", 9)
    assert member.report.leaning == DECODE
    assert told <= min(10 + took_s / MIN_CACHE_REPORT_INTERVAL_S, changes - 1), "not one for each"
    took_s = time.monotonic() - began_s
    unknown = sum(event["event"] == "worker.leaning_unknown" for event in shared.members["a"].events())
    assert 1 <= unknown <= 1 + took_s / UNKNOWN_LOGGED_EVERY_S
    await registry.assert_no_leaks()


async def test_a_ticket_for_the_worker_s_own_blocks_is_refused(shared: NeutralProcesses) -> None:
    """Also where a coordinator has told the worker that it is a peer of itself."""
    registry = shared.registry
    async with direct_workers(registry, "a", "b") as (a, b):
        prompt = tokens(60, 3)
        ticket = await a.reserve("own", prompt, a.agent_id)
        with pytest.raises(FailedPreconditionError) as refused:
            await a.compute("own", prompt, ticket)
        assert (refused.value.reason, refused.value.field) == ("TICKET_OWN", "ticket.decode_agent_id")
        assert await a.abort("own", no_writer=True)
        assert ticket is not None
        ticket.writer_agent_id = ""
        with pytest.raises(FailedPreconditionError):
            await a.compute("own", prompt, ticket)
        await one_of_each(a, b, "own", 40)
    await registry.until(lambda: registry.members["a"].report.load.rejected_handoffs == 2, "they are counted")
    await registry.assert_no_leaks()


async def test_a_coordinator_s_id_has_no_slash(shared: NeutralProcesses) -> None:
    """Or its requests could have the ids of prompts."""
    async with make_channel(shared.registry.members["a"].registration.address) as channel:
        for bad in ("", "/r", "a/b"):
            call = DecodeServiceStub(channel).StreamOutputs(
                decode_pb2.StreamOutputsRequest(coordinator_id=bad)
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in call:
                    pass
            error = error_from_rpc(refused.value)
            assert isinstance(error, InvalidArgumentError)
            assert error.field == "coordinator_id"


async def test_a_worker_is_killed_in_the_middle_of_handoffs_both_ways(log_dir: Path) -> None:
    """The other one fails what needed it, each with a typed error, serves on, and gets all its blocks back."""
    options = ["--simulated-prefill-token-s", "0.002", "--max-step-tokens", "32"]
    async with neutral_processes(log_dir, "simulated", *options) as workers:
        registry = workers.registry
        async with direct_workers(registry, "a", "b") as (a, b):
            # Handoffs that take many seconds: they are still in the middle when it is seen that they are.
            to_b, to_a, alone = (tokens(length, n) for n, length in enumerate((LONG, LONG, 100)))
            ticket = await b.reserve("ab", to_b, a.agent_id)
            answers = [
                asyncio.create_task(work)
                for work in (
                    a.compute("ab", to_b, ticket),
                    b.rest("ab"),
                    hand_off(b, a, "ba", to_a),
                    b.local("b", alone),
                )
            ]
            await registry.until(
                lambda: all(
                    member.report.load.running_requests and member.report.load.reserved_blocks
                    for member in registry.members.values()
                ),
                "both compute and have reservations",
            )
            workers.members["a"].kill()
            registry.lost("a")
            computed, continued, sent, kept = await asyncio.gather(*answers, return_exceptions=True)
            assert isinstance(computed, SplitserveError)
            assert isinstance(continued, SplitserveError)
            assert "writer's process ended" in continued.message
            assert isinstance(sent, SplitserveError)
            assert kept == expected_tokens(alone, MAX_TOKENS)
        await registry.assert_no_leaks()
        workers.members["a"].start()
        await registry.until_connected(2)
        async with direct_workers(registry, "a", "b") as (a, b):
            await one_of_each(a, b, "again", 5)
        await registry.assert_no_leaks()


async def test_a_drain_while_both_parts_are_busy(log_dir: Path) -> None:
    """What runs ends well in both directions; what comes is refused; the process ends with 0."""
    options = ["--simulated-step-s", "0.02", "--max-step-tokens", "32", "--drain", "60"]
    async with neutral_processes(log_dir, "simulated", *options) as workers:
        registry = workers.registry
        async with direct_workers(registry, "a", "b") as (a, b):
            prompts = [tokens(200, n) for n in range(4)]
            # What is reserved stays so until its prompt is computed, and keeps the drain from its end.
            ticket = await a.reserve("ba", prompts[1], b.agent_id)
            answers = [
                asyncio.create_task(work)
                for work in (
                    hand_off(a, b, "ab", prompts[0]),
                    a.rest("ba"),
                    a.local("a", prompts[2], max_tokens=LONG_ANSWER),
                    b.local("b", prompts[3]),
                )
            ]

            def busy() -> bool:
                load = registry.members["a"].report.load
                return load.reserved_blocks > 0 and (load.running_requests > 0 or answers[2].done())

            await registry.until(busy, "both parts are busy")
            ended = asyncio.get_running_loop().run_in_executor(None, workers.members["a"].terminate)
            await registry.until(lambda: registry.members["a"].report.draining, "it drains")
            registry.tell(registry.members["a"], DECODE)
            for refused in (a.reserve("late", prompts[0]), a.compute("late", prompts[0], None)):
                with pytest.raises(UnavailableError) as error:
                    await refused
                assert error.value.reason == "DRAINING"
            first = await b.compute("ba", prompts[1], ticket)
            ab, ba, *local = await asyncio.gather(*answers)
            lengths = (MAX_TOKENS, MAX_TOKENS, LONG_ANSWER, MAX_TOKENS)
            wanted = [expected_tokens(p, count) for p, count in zip(prompts, lengths, strict=True)]
            assert [ab, [*first, *ba], *local] == wanted
            assert await ended == 0
            registry.lost("a")
            assert await b.local("after", prompts[0]) == expected_tokens(prompts[0], MAX_TOKENS)
        await registry.assert_no_leaks()
