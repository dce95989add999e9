"""Neutral workers as real processes under a coordinator: leanings change under load, and follow it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.policy_in_force import PolicyFile
from autoscaler.service import control_loop
from autoscaler.snapshot import POOLS
from coordinator.leanings.leaning_planner import ORDER_LASTS_S
from engine.runner.simulated_runner import expected_tokens
from splitserve.client import AsyncClient
from splitserve.client.scaling_client import ScalingClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.clients.traffic import REPEATS
from tests.support.cluster.ports import free_port
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.core_waits import cluster_waits
from tests.support.engine.reference import Reference
from tests.support.scaling.fake_actuator import FakeActuator
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S, SLACK_S

Leaning = Literal["prefill", "decode"]
SWITCHED: tuple[dict[str, Leaning], ...] = (
    {"worker-0": "decode", "worker-1": "prefill"},
    {"worker-0": "decode", "worker-1": "decode"},
    {"worker-0": "prefill", "worker-1": "decode"},
    {"worker-0": "prefill", "worker-1": "prefill"},
)
"""All ways for two workers to lean, in a circle of steps that change one or both."""


async def until(client: AsyncClient, is_so: Callable[[dict[str, str]], bool]) -> None:
    """Waits until leanings are such, as the coordinator has it from the workers."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so({w.worker_id: w.pool for w in (await client.server_info()).workers}):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


async def switched_under(load: asyncio.Task[None], cluster: Cluster, client: AsyncClient, times: int) -> None:
    """Changes leanings by plans, each once the one before has been followed, while the load runs."""
    async with ScalingClient(cluster.target, timeout_s=PATIENCE_S) as scaling:
        for leanings in itertools.islice(itertools.cycle(SWITCHED), times):
            await scaling.apply_plan(leanings=leanings)
            await until(client, partial(eq, leanings))
            assert not load.done() or load.exception() is None
    load.cancel()


async def followed(scaling: ScalingClient, client: AsyncClient, leanings: dict[str, Leaning]) -> None:
    """A plan that holds until it has been followed, and for a second more."""
    deadline_s = time.monotonic() + PATIENCE_S
    while {w.worker_id: w.pool for w in (await client.server_info()).workers} != leanings:
        assert time.monotonic() < deadline_s
        await scaling.apply_plan(leanings=leanings, valid_s=1.0)
        await asyncio.sleep(0.05)


@asynccontextmanager
async def loaded(ask: Callable[[int], Awaitable[None]], lanes: int) -> AsyncIterator[asyncio.Task[None]]:
    """So many requests at any time, as long as the context is open. `ask(number)` fails a wrong answer."""

    async def lane(first: int) -> None:
        for number in itertools.count(first, lanes):
            await ask(number)

    async def all_lanes() -> None:
        async with asyncio.TaskGroup() as group:
            for first in range(lanes):
                group.create_task(lane(first))

    task = asyncio.create_task(all_lanes())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


@pytest.mark.timeout(180)
async def test_leanings_change_20_times_under_load_and_nothing_fails(log_dir: Path) -> None:
    options = ["--leanings", "fixed", "--ttft-slo", "5", "--tpot-slo", "1"]
    engine = ["--simulated-step-s", "0.002", "--heartbeat", "0.1"]
    setup = Cluster(log_dir, neutral=2, worker_options=engine, coordinator_options=options)
    async with running(setup) as cluster:
        async with AsyncClient(cluster.target) as client:
            answered = 0

            async def ask(number: int) -> None:
                nonlocal answered
                prompt = [(number * 31 + 7 * n) % 250 for n in range(20 + number * 13 % 300)]
                answer = await client.generate(prompt, max_tokens=24, temperature=0.0, ignore_eos=True)
                assert list(answer.token_ids) == expected_tokens(prompt, 24)
                assert answer.served_by.attempts == 1
                answered += 1

            async with loaded(ask, lanes=8) as load:
                await switched_under(load, cluster, client, times=20)
        await cluster.assert_no_leaks()
    assert answered > 20


@pytest.mark.slow
@pytest.mark.timeout(2 * LEAST_TIMEOUT_S)
async def test_a_load_that_turns_from_prompts_to_tokens_is_followed_within_10_s(log_dir: Path) -> None:
    """Of three workers two lean to prefill at first. Long prompts keep them there; many streams take one away."""
    for _ in range(REPEATS):
        early, asked, took_s = await turned(log_dir)
        if not early and took_s <= 10.0:
            break
    assert not early, "the prompts keep them there"
    assert took_s <= 10.0 + SLACK_S
    assert 1 <= len(asked) <= 1 + took_s / ORDER_LASTS_S
    assert {order["pool"] for order in asked} == {"decode"}
    assert all(order["decode_pressure"] > 1 for order in asked)


Ask = Callable[[int], Awaitable[None]]


@asynccontextmanager
async def turning(log_dir: Path) -> AsyncIterator[tuple[Cluster, AsyncClient, Ask, Ask]]:
    """Three workers, two of which lean to prefill, and what asks for a long prompt, or a long answer."""
    # A step of four streams takes a third of what would press the side, so that what a busy machine adds does not.
    options = ["--ttft-slo", "2", "--tpot-slo", "0.1", "--admission", "off"]
    engine = [
        "--simulated-prefill-token-s",
        "0.0005",
        "--simulated-step-s",
        "0.01",
        "--simulated-sequence-s",
        "0.004",
    ]
    engine += ["--heartbeat", "0.2", "--no-prefix-cache"]
    setup = Cluster(log_dir, neutral=3, worker_options=engine, coordinator_options=options)
    async with running(setup) as cluster:
        async with AsyncClient(cluster.target) as client:

            async def prompts(number: int) -> None:
                await client.generate([number % 250] * 400, max_tokens=4, ignore_eos=True)

            async def tokens(number: int) -> None:
                await client.generate([number % 250] * 16, max_tokens=400, ignore_eos=True)

            yield cluster, client, prompts, tokens
        await cluster.assert_no_leaks()


async def turned(log_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float]:
    """What the coordinator has asked workers for before and after the load turns, and how many seconds it took to come
    true. What is early or late fails here, unless the machine was slow: steps then take what many streams do."""
    async with turning(log_dir) as (cluster, client, prompts, tokens):
        waits = cluster_waits(cluster)
        async with loaded(prompts, lanes=4):
            await asyncio.sleep(3.0)
        turned_s, turned_wall_s = time.monotonic(), time.time()
        async with loaded(tokens, lanes=24):
            await until(client, lambda leanings: list(leanings.values()).count("decode") == 2)
            took_s = time.monotonic() - turned_s
        asked = [e for e in cluster.members["coordinator"].events() if e.get("event") == "leaning.asked"]
        early = [e for e in asked if datetime.fromisoformat(e["time"]).timestamp() < turned_wall_s]
        if early or took_s > 10.0:
            waits.assert_slow(f"asked before: {early}, took {took_s:.1f} s")
    return early, asked[len(early) :], took_s


RULES = {"min_replicas": 1, "max_replicas": 3, "gpus_per_replica": 1}
POLICY = {
    "workers": "neutral",
    "gpu_budget": 3,
    "interval_s": 3.0,
    "prefill": RULES | {"target_ms": 2000},
    "decode": RULES | {"target_ms": 100},
}


@asynccontextmanager
async def autoscaled(cluster: Cluster, folder: Path) -> AsyncIterator[FakeActuator]:
    """An autoscaler that has the cluster's three workers, looks back for a minute, and has a plan in force."""
    rules, actuator = folder / "policy.yaml", FakeActuator()
    rules.write_text(yaml.safe_dump(POLICY))
    for number, pool in enumerate(POOLS[at % 2] for at in range(3)):
        actuator.there[f"worker-{number}"] = ActualReplica(f"worker-{number}", pool, False, float(number))
    async with (
        control_loop(PolicyFile(rules), (cluster.target,), actuator) as loop,
        ScalingClient(cluster.target, timeout_s=PATIENCE_S) as scaling,
    ):
        running_loop = asyncio.create_task(loop.run())
        try:
            while not (await scaling.signals()).plan.movable_worker_ids:
                assert not running_loop.done()
                await asyncio.sleep(0.05)
            yield actuator
        finally:
            running_loop.cancel()
            await asyncio.wait([running_loop])


@pytest.mark.slow
@pytest.mark.timeout(2 * LEAST_TIMEOUT_S)
async def test_a_turn_of_the_load_is_followed_while_an_autoscalers_plan_is_in_force(log_dir: Path) -> None:
    """And the autoscaler, which looks back at a minute of prompts, neither undoes it nor starts or ends anybody."""
    for _ in range(REPEATS):
        seen, took_s = await turned_under_a_plan(log_dir)
        if seen == FOLLOWED and took_s <= 10.0:
            break
    assert seen == FOLLOWED
    assert took_s <= 10.0 + SLACK_S


@dataclass(frozen=True)
class Seen:
    """Where workers lean in the end, the sides that the coordinator asked for, and the actuator's calls."""

    leanings: list[str]
    asked: list[str]
    calls: list[Any]


FOLLOWED = Seen(["decode", "decode", "prefill"], ["decode"], [])


async def turned_under_a_plan(log_dir: Path) -> tuple[Seen, float]:
    """And how many seconds it took to come true. What is otherwise fails here, unless the machine was slow."""
    async with (
        turning(log_dir) as (cluster, client, prompts, tokens),
        autoscaled(cluster, log_dir) as actuator,
    ):
        waits = cluster_waits(cluster)
        async with loaded(prompts, lanes=4):
            await asyncio.sleep(2.0)
        turned_s = time.monotonic()
        async with loaded(tokens, lanes=24):
            await until(client, lambda leanings: list(leanings.values()).count("decode") == 2)
            took_s = time.monotonic() - turned_s
            await asyncio.sleep(3.5)  # one more plan at least
            leanings = sorted(worker.pool for worker in (await client.server_info()).workers)
        asked = [e for e in cluster.members["coordinator"].events() if e.get("event") == "leaning.asked"]
        seen = Seen(leanings, [order["pool"] for order in asked], list(actuator.calls))
        if seen != FOLLOWED or took_s > 10.0:
            waits.assert_slow(f"{seen}, took {took_s:.1f} s")
    return seen, took_s


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_of_two_coordinators_one_moves_workers_and_then_the_other(log_dir: Path) -> None:
    """Both see the same three workers, two of which lean to prefill, and load them with streams."""
    options = ["--ttft-slo", "2", "--tpot-slo", "0.05", "--admission", "off"]
    engine = ["--simulated-step-s", "0.005", "--simulated-sequence-s", "0.003", "--heartbeat", "0.2"]
    port = free_port()
    other = ServiceProcess(
        "other", ["coordinator", "--grpc-port", str(port), "--http-port", "off", *options], log_dir, {}
    )
    other_target = f"127.0.0.1:{port}"
    engine += ["--coordinator", other_target]
    setup = Cluster(log_dir, neutral=3, worker_options=engine, coordinator_options=options)
    other.start()
    try:
        other.wait_event("coordinator.ready")
        async with (
            running(setup) as cluster,
            AsyncClient(cluster.target) as ours,
            AsyncClient(other_target) as theirs,
        ):
            await theirs.wait_ready(PATIENCE_S)
            sites = {"coordinator": (cluster.members["coordinator"], ours), "other": (other, theirs)}

            def moves(name: str) -> int:
                return sum(e.get("event") == "leaning.asked" for e in sites[name][0].events())

            def on(client: AsyncClient) -> Callable[[int], Awaitable[None]]:
                async def ask(number: int) -> None:
                    await client.generate([number % 250] * 16, max_tokens=400, ignore_eos=True)

                return ask

            async with loaded(on(ours), lanes=12), loaded(on(theirs), lanes=12):
                await until(ours, lambda leanings: list(leanings.values()).count("decode") == 2)
                await asyncio.sleep(1.2)  # the other one has looked, too
            counts = {name: moves(name) for name in sites}
            (leader,) = [name for name, count in counts.items() if count]
            assert counts[leader] == 1
            (left,) = [name for name in sites if name != leader]
            if leader == "coordinator":
                cluster.target = other_target
            sites[leader][0].kill()
            async with ScalingClient(cluster.target, timeout_s=PATIENCE_S) as scaling:
                leanings: dict[str, Leaning] = {f"worker-{n}": "prefill" for n in range(3)}
                await followed(scaling, sites[left][1], leanings)
            # A side without workers gets one, by whoever moves them now.
            await until(sites[left][1], lambda found: "decode" in found.values())
            assert moves(left) == 1
            await cluster.assert_no_leaks()
    finally:
        other.terminate()


async def test_one_worker_alone_serves(log_dir: Path) -> None:
    async with running(Cluster(log_dir, neutral=1)) as cluster:
        async with AsyncClient(cluster.target) as client:
            for size in (1, 40, 300):
                prompt = [(11 * n) % 250 for n in range(size)]
                answer = await client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
                assert list(answer.token_ids) == expected_tokens(prompt, 8)
                single = await client.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
                assert list(single.token_ids) == expected_tokens(prompt, 1)
        await cluster.assert_no_leaks()
    assert answer.served_by.decode_worker == "worker-0"


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_real_answers_do_not_depend_on_leanings(log_dir: Path, smollm2: str) -> None:
    options = ["--leanings", "fixed", "--ttft-slo", "4", "--tpot-slo", "0.5"]
    engine = ["--dtype", "float32", "--kv-memory-bytes", "100000000", "--heartbeat", "0.1"]
    setup = Cluster(
        log_dir,
        model=smollm2,
        engine="torch",
        neutral=2,
        worker_options=engine,
        coordinator_options=options,
    )
    tokens, reference = load_tokenizer(smollm2).encode(sentences(60, seed=8)), Reference(smollm2)
    prompts = [tokens[7 * n : 7 * n + 40 + 30 * n] for n in range(6)]
    right = [reference.greedy(prompt, 8) for prompt in prompts]
    async with running(setup) as cluster:
        async with AsyncClient(cluster.target, timeout_s=120) as client:

            async def ask(number: int) -> None:
                prompt, expected = prompts[number % 6], right[number % 6]
                answer = await client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
                assert list(answer.token_ids) == expected
                assert answer.served_by.attempts == 1

            async with loaded(ask, lanes=3) as load:
                await switched_under(load, cluster, client, times=4)
        await cluster.assert_no_leaks()
