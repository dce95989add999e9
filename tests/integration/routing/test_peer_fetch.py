"""Prefixes are fetched from the worker that holds them: sooner, never with another answer, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.runner.simulated_runner import expected_tokens
from splitserve.client import AsyncClient
from tests.support.clients.traffic import REPEATS
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import eventually, tokens
from tests.support.core_waits import cluster_waits
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LEAST_TIMEOUT_S)]
PREFIX, ANSWER = 320, 4
TOO_LATE = ("FETCH_TOO_SLOW", "DEADLINE_EXCEEDED")
"""As the coordinator says it, and as a worker does."""
TOKEN_S, HEARTBEAT_S = 0.002, 0.1
WORKERS = ["--simulated-prefill-token-s", str(TOKEN_S), "--block-size", "16", "--heartbeat", str(HEARTBEAT_S)]
COORDINATOR = ["--routing", "round-robin", "--peer-fetch", "on", "--leanings", "fixed", "--hybrid", "off"]


def events(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    return [event for event in cluster.members["coordinator"].events() if event["event"] == name]


def fetches(cluster: Cluster) -> list[dict[str, Any]]:
    return events(cluster, "prefix.fetched")


async def ask(client: AsyncClient, prompt: list[int]) -> tuple[str, int]:
    """The worker that computed it, and how many tokens it had."""
    answer = await client.generate(prompt, max_tokens=ANSWER, temperature=0.0)
    assert list(answer.token_ids) == expected_tokens(prompt, ANSWER)
    return answer.served_by.prefill_worker, answer.usage.cached_prompt_tokens


async def fetched(
    cluster: Cluster, client: AsyncClient, first_seed: int = 0
) -> tuple[list[int], dict[str, Any]]:
    """A prefix that one worker has computed and another one fetched, and the fetch."""
    count = len(fetches(cluster))
    for seed in range(first_seed, first_seed + 20):
        prefix = tokens(PREFIX, seed)
        first, cached = await ask(client, [*prefix, 1])
        assert cached == 0
        await asyncio.sleep(
            3 * HEARTBEAT_S
        )  # the holder reports its blocks; if it is late, with the next prefix
        where, cached = await ask(client, [*prefix, 2, 3])
        slow = [fetch["failure"] for fetch in fetches(cluster)[count:] if fetch["failure"]]
        assert all(failure.startswith(TOO_LATE) for failure in slow), "as on a busy machine"
        if found := [fetch for fetch in fetches(cluster)[count:] if not fetch["failure"]]:
            assert (found[-1]["holder"], found[-1]["taker"], found[-1]["tokens"]) == (first, where, PREFIX)
            assert cached == PREFIX
            return prefix, found[-1]
    raise AssertionError("no prefix is ever fetched")


async def seeded_whole(
    cluster: Cluster,
    warm: Callable[[], Awaitable[None]],
    names: Iterable[str],
    blocks: int,
    pool: str,
    *options: str,
) -> tuple[str, dict[str, Any]]:
    """The new worker that has got so many blocks, all that `warm` makes hot, and what is told of its seeding. Where the
    machine was too slow for one of the prefixes, or for a lane or a report in time, another worker comes."""
    waits = cluster_waits(cluster)
    for name in names:
        await warm()
        added = cluster.add_worker(pool, name, *options)
        added.wait_event("worker.ready")
        seeded = await seeding_of(cluster, name)
        if seeded["blocks"] == blocks:
            return name, seeded
        failed = [each for each in events(cluster, "worker.seed_failed") if each["worker_id"] == name]
        assert {each["reason"] for each in failed} <= {*TOO_LATE, "NO_TIME_TO_SEED"}
        if not failed:
            waits.assert_slow(f"{name} has {seeded['blocks']} blocks of {blocks}")
        added.terminate()
    raise AssertionError("no worker gets all prefixes")


async def seeding_of(cluster: Cluster, name: str) -> dict[str, Any]:
    """What is told of the seeding of a new worker, once it is over."""

    def told() -> list[dict[str, Any]]:
        return [event for event in events(cluster, "worker.seeded") if event["worker_id"] == name]

    await eventually(lambda: bool(told()), f"{name} is seeded")
    return told()[0]


async def test_a_prefix_is_fetched_once_a_worker_and_answers_stay_the_same(log_dir: Path) -> None:
    (faults := log_dir / "faults.yaml").write_text("faults: {latency_s: 0.05}\n")
    slow = [*WORKERS, "--config", str(faults)]
    setup = Cluster(log_dir, neutral=3, worker_options=slow, coordinator_options=COORDINATOR)
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        waits = cluster_waits(cluster)
        for repeat in range(REPEATS):
            prefix, fetch = await fetched(cluster, client, 20 * repeat)
            if fetch["took_ms"] < fetch["compute_ms"]:
                break
        assert fetch["took_ms"] < fetch["compute_ms"], "sooner than computing"
        count = len(fetches(cluster))
        for number in range(4):
            assert (await ask(client, [*prefix, 4, number]))[1] == PREFIX
        assert len(fetches(cluster)) == count, "both have it now"
        # Another prefix, by several prompts at once: the first one fetches it, and those after it wait for that.
        for seed in range(100, 120):
            prefix, before = tokens(PREFIX, seed), len(fetches(cluster))
            await ask(client, [*prefix, 1])
            await asyncio.sleep(3 * HEARTBEAT_S)  # as above
            asked = await asyncio.gather(*(ask(client, [*prefix, 5, number]) for number in range(6)))
            new = fetches(cluster)[before:]
            late = [fetch["failure"] for fetch in new if fetch["failure"]]
            assert all(failure.startswith(TOO_LATE) for failure in late)
            begun = [fetch["joined"] for fetch in new].count(False)
            found = [cached for _, cached in asked]
            if not late and begun == 1 and len(new) >= 2 and found == [PREFIX] * 6:
                break
            # The holder's report was late, or such fetches have been, so that computing it seemed to be sooner; or the
            # fetch was over before the next prompt came.
            waits.assert_slow(f"{begun} fetches of {new}, found: {found}")
        else:
            raise AssertionError("no prompt waits for the fetch of another one")
        await cluster.assert_no_leaks()


async def test_a_holder_that_has_died_costs_time_alone(log_dir: Path) -> None:
    setup = Cluster(log_dir, neutral=3, worker_options=WORKERS, coordinator_options=COORDINATOR)
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        await fetched(cluster, client)
        prefix = tokens(PREFIX, 200)
        holder, _ = await ask(client, [*prefix, 1])
        await asyncio.sleep(3 * HEARTBEAT_S)
        cluster.members[holder].kill()
        # It is in the index for a moment still: whoever is chosen, the answers are right.
        await asyncio.gather(*(ask(client, [*prefix, 7, number]) for number in range(4)))
        cluster.members[holder].start()
        await cluster.wait_ready()
        await asyncio.gather(*(ask(client, [*prefix, 8, number]) for number in range(4)))
        await cluster.assert_no_leaks()


async def test_a_new_worker_is_seeded_with_what_is_hot_within_ten_seconds(log_dir: Path) -> None:
    """Its first prompts then find what those of the others find."""
    prefixes = [tokens(PREFIX, 300 + number) for number in range(4)]
    setup = Cluster(log_dir, neutral=2, worker_options=WORKERS, coordinator_options=COORDINATOR)
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:

        async def warm() -> None:
            for turn in range(4):
                await asyncio.gather(*(ask(client, [*prefix, turn]) for prefix in prefixes))
                await asyncio.sleep(3 * HEARTBEAT_S)

        names = (f"worker-new-{repeat}" for repeat in range(REPEATS))
        blocks = 4 * PREFIX // 16
        name, seeded = await seeded_whole(cluster, warm, names, blocks, "neutral", "--leaning", "prefill")
        assert seeded["took_s"] < 10.0
        before = len(fetches(cluster))
        served: dict[str, int] = {}
        for turn in range(3):
            for prefix in prefixes:
                where, cached = await ask(client, [*prefix, 50 + turn])
                assert cached == PREFIX
                served[where] = served.get(where, 0) + 1
        assert served[name] >= 4
        assert len(fetches(cluster)) == before
        await cluster.assert_no_leaks()
