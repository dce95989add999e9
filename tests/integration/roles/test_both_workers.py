"""Two workers of role both without a coordinator that routes: both services, both directions, roles that change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from splitserve.client.registry_client import MIN_CACHE_REPORT_INTERVAL_S
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, SplitserveError, UnavailableError
from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import decode_pb2, registry_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from tests.support.cluster.streams import tokens
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.roles.both_processes import BothProcesses, both_processes
from tests.support.roles.direct_requests import MAX_TOKENS, DirectWorker, direct_workers, hand_off
from tests.support.roles.scripted_registry import ScriptedRegistry
from tests.support.waiting import LEAST_TIMEOUT_S, SLACK_S
from worker.role import REFUSED_LOGGED_EVERY_S

PREFILL, DECODE, BOTH = registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE, registry_pb2.ROLE_BOTH
LONG_ANSWER = 100
"""Tokens of an answer that a drain finds under way: 2 s."""
LONG = 5000
"""Prompt tokens of handoffs that a worker's death ends: 10 s of computation."""
SOON_S = SLACK_S / 6
"""By when a change of role is in a report, though requests run all the time: it waits for none of them."""

# The registry of the shared workers runs in this process, and so in the loop of the module.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LEAST_TIMEOUT_S),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BothProcesses]:
    """Small pools, and a registry that tells each worker of itself as well."""
    log_dir = tmp_path_factory.mktemp("logs")
    options = ["--num-blocks", "96", "--simulated-step-s", "0.002"]
    async with both_processes(log_dir, "simulated", *options, own_peers=True) as workers:
        yield workers


async def one_of_each(a: DirectWorker, b: DirectWorker, name: str, seed: int) -> None:
    """An answer in each direction and one of each worker alone, all at once and under one id."""
    prompts = [tokens(60 + 7 * n, seed + n) for n in range(4)]
    answers = await asyncio.gather(
        hand_off(a, b, name, prompts[0]),
        hand_off(b, a, name, prompts[1]),
        a.local(f"{name}-alone", prompts[2]),
        b.local(f"{name}-alone", prompts[3]),
        return_exceptions=True,
    )
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    assert answers == [expected_tokens(prompt, MAX_TOKENS) for prompt in prompts]


async def take(registry: ScriptedRegistry, name: str, role: int) -> float:
    """Asks for a role; the seconds until a report has it."""
    member, began = registry.members[name], time.monotonic()
    registry.tell(member, role)
    await registry.until(lambda: member.report.role == role, f"{name} has role {role}")
    return next(at for at, reported in reversed(member.roles) if reported == role) - began


def changes(shared: BothProcesses) -> int:
    """How often worker a has changed its role."""
    return sum(event["event"] == "worker.role_changed" for event in shared.members["a"].events())


async def test_answers_in_both_directions_and_locally_at_once(shared: BothProcesses) -> None:
    registry = shared.registry
    for member in registry.members.values():
        assert member.registration.role == member.report.role == BOTH
        assert member.registration.changes_role
    async with direct_workers(registry, "a", "b") as (a, b):
        await asyncio.gather(*(one_of_each(a, b, f"r{n}", 10 * n) for n in range(8)))
    await registry.assert_no_leaks()


async def test_roles_change_under_load_and_no_request_under_way_fails(shared: BothProcesses) -> None:
    """New requests of the other kind are refused, each with an error that says so; nothing else fails."""
    registry, over, reasons = shared.registry, asyncio.Event(), set[str]()

    async def load(a: DirectWorker, b: DirectWorker, lane: int) -> int:
        count = 0
        while not over.is_set():
            try:
                await one_of_each(a, b, f"l{lane}-{count}", 1000 * lane + 10 * count)
            except SplitserveError as error:
                reasons.add(error.reason)
            count += 1
        return count

    async with direct_workers(registry, "a", "b") as (a, b):
        loads = [asyncio.create_task(load(a, b, lane)) for lane in range(1, 4)]
        took = []
        for turn in range(20):
            roles = ((DECODE, PREFILL), (BOTH, BOTH), (PREFILL, DECODE), (BOTH, BOTH))[turn % 4]
            for name, role in zip(("a", "b"), roles, strict=True):
                took.append(await take(registry, name, role))
        over.set()
        assert sum(await asyncio.gather(*loads)) >= 3
        for name in ("a", "b"):
            await take(registry, name, BOTH)
        await one_of_each(a, b, "after", 17)
    assert reasons <= {"WRONG_ROLE"}, "what was refused, and nothing else"
    assert sorted(took)[len(took) // 2] < SOON_S, took
    events = [event for event in shared.members["a"].events() if event["event"] == "worker.role_changed"]
    assert {(event["from"], event["to"]) for event in events} == {
        ("both", "decode"),
        ("decode", "both"),
        ("both", "prefill"),
        ("prefill", "both"),
    }
    await registry.assert_no_leaks()


async def test_what_is_under_way_goes_on_and_what_is_new_is_refused(shared: BothProcesses) -> None:
    registry = shared.registry
    async with direct_workers(registry, "a", "b") as (a, b):
        prompt, other = tokens(60, 5), tokens(70, 6)
        ticket = await b.reserve("under-way", prompt, a.agent_id)
        await take(registry, "b", PREFILL)
        first = await a.compute("under-way", prompt, ticket)
        assert [*first, *await b.rest("under-way")] == expected_tokens(prompt, MAX_TOKENS)
        with pytest.raises(UnavailableError) as refused:
            await b.reserve("late", other, a.agent_id)
        assert refused.value.reason == "WRONG_ROLE"
        await take(registry, "a", DECODE)
        with pytest.raises(UnavailableError) as refused:
            await a.compute("late", other, None)
        assert refused.value.reason == "WRONG_ROLE"
        assert await hand_off(b, a, "turned", other) == expected_tokens(other, MAX_TOKENS)
        for name in ("a", "b"):
            await take(registry, name, BOTH)
    await registry.assert_no_leaks()


async def test_a_storm_of_roles_and_unknown_ones(shared: BothProcesses) -> None:
    """A value that no version knows changes nothing; of many the latest counts, and reports stay few."""
    registry, member = shared.registry, shared.registry.members["a"]
    await take(registry, "a", PREFILL)
    seen, began_s = len(member.roles), time.monotonic()
    # It starts at PREFILL and ends at BOTH; in between the worker has role BOTH many times, so a report that says
    # so ends nothing: the worker's log counts how far it is.
    storm = [99 if turn % 3 == 2 else (BOTH, PREFILL)[turn % 2] for turn in range(301)] + [BOTH]
    known = [PREFILL] + [role for role in storm if role != 99]
    expected = sum(after != before for before, after in pairwise(known))
    changed = changes(shared) + expected
    async with direct_workers(registry, "a", "b") as (a, b):
        answers = asyncio.create_task(hand_off(a, b, "storm", tokens(60, 7)))
        for role in storm:
            registry.tell(member, role)
        await registry.until(lambda: changes(shared) == changed, "the last of them has arrived")
        await registry.until(lambda: member.report.role == BOTH, "the latest counts")
        took_s, told = time.monotonic() - began_s, len(member.roles) - seen
        registry.tell(member, 77)
        registry.tell(member, 0)
        await answers
        await one_of_each(a, b, "after-storm", 9)
    assert member.report.role == BOTH
    assert told <= min(10 + took_s / MIN_CACHE_REPORT_INTERVAL_S, expected - 1), "not one for each"
    took_s = time.monotonic() - began_s
    unknown = sum(event["event"] == "worker.role_refused" for event in shared.members["a"].events())
    assert 1 <= unknown <= 1 + took_s / REFUSED_LOGGED_EVERY_S
    await registry.assert_no_leaks()


async def test_a_ticket_for_the_worker_s_own_blocks_is_refused(shared: BothProcesses) -> None:
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


async def test_a_coordinator_s_id_has_no_slash(shared: BothProcesses) -> None:
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
    async with both_processes(log_dir, "simulated", *options) as workers:
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
    async with both_processes(log_dir, "simulated", *options) as workers:
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
            registry.tell(registry.members["a"], BOTH)
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
