"""Workers that sleep, as real processes with a simulated engine: what they refuse, who wakes them, and how they die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from engine.runner.simulated_runner import expected_tokens
from splitserve.client import AsyncClient
from splitserve.client.scaling_client import ScalingClient
from splitserve.errors import DeadlineExceededError, UnavailableError
from tests.support.clients.patient import PatientClient, PatientScalingClient
from tests.support.cluster.ports import free_port
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import POLL_S, Reading, tokens
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

OPTIONS = ["--simulated-step-s", "0.005", "--heartbeat", "0.1", "--num-blocks", "4096"]

pytestmark = pytest.mark.timeout(LEAST_TIMEOUT_S)


@asynccontextmanager
async def cluster_of(
    log_dir: Path, *options: str, **counts: int
) -> AsyncIterator[tuple[Cluster, AsyncClient, ScalingClient]]:
    cluster = Cluster(log_dir, worker_options=[*OPTIONS, *options], **counts)  # type: ignore[arg-type]
    async with running(cluster), cluster.client() as client, PatientScalingClient(cluster.target) as scaling:
        yield cluster, client, scaling


async def plan(scaling: ScalingClient, *, asleep: tuple[str, ...] = (), active: tuple[str, ...] = ()) -> None:
    await scaling.apply_plan(standby=asleep, sleeping=asleep, active=active, valid_s=PATIENCE_S)


async def state(client: AsyncClient, **states: str) -> None:
    """Waits until these workers, by names with underscores, are in these states; `gone` if they are to be nowhere."""
    wanted = {name.replace("_", "-"): one for name, one in states.items()}
    there: dict[str, str] = {}
    deadline = time.monotonic() + PATIENCE_S
    while any(there.get(name, "gone") != one for name, one in wanted.items()) or not there:
        assert time.monotonic() < deadline, f"{there}, not {wanted}"
        with suppress(DeadlineExceededError, UnavailableError):  # a busy machine, or one that starts
            there = {worker.worker_id: worker.state for worker in (await client.server_info()).workers}
        await asyncio.sleep(POLL_S)


async def asks(client: AsyncClient, seed: int, count: int = 8) -> None:
    prompt = tokens(60, seed)
    answer = await client.generate(prompt, max_tokens=count, ignore_eos=True, timeout_s=PATIENCE_S)
    assert list(answer.token_ids) == expected_tokens(prompt, count)


async def test_what_runs_is_finished_first_and_the_same_answers_come_after_waking(log_dir: Path) -> None:
    async with cluster_of(log_dir, prefill=2, decode=2) as (cluster, client, scaling):
        async with asyncio.TaskGroup() as group:
            for seed in range(4):
                group.create_task(asks(client, seed))
        before = {worker.worker_id: worker for worker in (await client.server_info()).workers}
        streams = [Reading(client, tokens(60, 100 + n), max_tokens=300) for n in range(6)]
        for stream in streams:
            await stream.got(3)
        await plan(scaling, asleep=("prefill-1", "decode-1"))
        for stream in streams:
            await stream.task
            assert stream.tokens == expected_tokens(stream.prompt, 300)
        await state(client, prefill_1="sleeping", decode_1="sleeping", prefill_0="ready", decode_0="ready")
        async with asyncio.TaskGroup() as group:
            for seed in range(4):
                group.create_task(asks(client, seed))
        await cluster.assert_no_leaks()
        await plan(scaling, asleep=("prefill-0", "decode-0"), active=("prefill-1", "decode-1"))
        await state(client, prefill_1="ready", decode_1="ready", prefill_0="sleeping", decode_0="sleeping")
        async with asyncio.TaskGroup() as group:
            for seed in range(4):
                group.create_task(asks(client, seed))
        info = await client.server_info()
        woke = {w.worker_id: w.HasField("wake_seconds") for w in info.workers}
        assert woke == {"prefill-0": False, "prefill-1": True, "decode-0": False, "decode-1": True}
        assert before.keys() == {worker.worker_id for worker in info.workers}
        await cluster.assert_no_leaks()
    events = [each["event"] for each in cluster.members["decode-1"].events()]
    assert [one for one in events if one in ("worker.asleep", "worker.awake")] == [
        "worker.asleep",
        "worker.awake",
    ]


async def test_neutral_workers_sleep_and_again(log_dir: Path) -> None:
    async with cluster_of(log_dir, neutral=2) as (cluster, client, scaling):
        for turn in range(3):
            asleep, active = (f"worker-{turn % 2}",), (f"worker-{1 - turn % 2}",)
            await plan(scaling, asleep=asleep, active=active)
            states = {asleep[0]: "sleeping", active[0]: "ready"}
            await state(client, **{name.replace("-", "_"): one for name, one in states.items()})
            await asks(client, turn)
        await plan(scaling, active=("worker-0", "worker-1"))
        await state(client, worker_0="ready", worker_1="ready")
        async with asyncio.TaskGroup() as group:
            for seed in range(8):
                group.create_task(asks(client, seed))
        await cluster.assert_no_leaks()


async def test_killed_asleep_and_killed_as_it_wakes_up(log_dir: Path) -> None:
    """The other pair serves on, and a new process takes the place of the one that is gone."""
    async with cluster_of(log_dir, prefill=1, decode=2) as (cluster, client, scaling):
        await plan(scaling, asleep=("decode-1",))
        await state(client, decode_1="sleeping")
        cluster.members["decode-1"].kill()
        await asks(client, 1)
        await state(client, decode_1="gone")
        cluster.add_worker("decode", "decode-1", "--standby")
        await state(client, decode_1="sleeping")  # the plan still says so
        await plan(scaling, active=("decode-1",))
        cluster.members["decode-1"].wait_event("worker.waking")
        cluster.members["decode-1"].kill()
        await asyncio.gather(*(asks(client, seed) for seed in range(3)))
        await state(client, decode_1="gone")
        cluster.add_worker("decode", "decode-1", "--standby")
        await state(client, decode_1="ready")
        await plan(scaling, asleep=("decode-0",), active=("decode-1",))
        await state(client, decode_0="sleeping")
        await asks(client, 2)
        await cluster.assert_no_leaks()


async def test_two_coordinators_of_which_one_still_sends_keep_a_worker_awake(log_dir: Path) -> None:
    port = free_port()
    other = ServiceProcess(
        "other", ["coordinator", "--grpc-port", str(port), "--http-port", "off"], log_dir, {}
    )
    target = f"127.0.0.1:{port}"
    other.start()
    try:
        other.wait_event("coordinator.ready")
        async with (
            cluster_of(log_dir, "--coordinator", target) as (cluster, client, scaling),
            PatientClient(target) as theirs,
            PatientScalingClient(target) as second,
        ):
            await theirs.wait_ready()
            await plan(scaling, asleep=("prefill-0", "decode-0"))
            await state(client, prefill_0="standby", decode_0="standby")
            for seed in range(3):
                await asks(theirs, seed)
            await state(client, prefill_0="standby", decode_0="standby")
            await plan(second, asleep=("prefill-0", "decode-0"))
            for one in (client, theirs):
                await state(one, prefill_0="sleeping", decode_0="sleeping")
            waking = asyncio.create_task(theirs.wait_ready())
            await plan(second, active=("prefill-0", "decode-0"))
            await waking
            await asks(theirs, 9)
            await state(client, prefill_0="standby", decode_0="standby")
            # The one that wanted them awake is gone: the word of the other counts.
            other.kill()
            await state(client, prefill_0="sleeping", decode_0="sleeping")
            await plan(scaling, active=("prefill-0", "decode-0"))
            await state(client, prefill_0="ready", decode_0="ready")
            await asks(client, 10)
            await cluster.assert_no_leaks()
    finally:
        other.terminate()


async def test_a_coordinator_that_starts_anew_wakes_those_that_it_has_in_rotation(log_dir: Path) -> None:
    async with cluster_of(log_dir) as (cluster, client, scaling):
        cluster.add_worker("decode", "decode-1", "--standby")
        await state(client, decode_1="standby")
        await plan(scaling, asleep=("prefill-0", "decode-0", "decode-1"))
        await state(client, prefill_0="sleeping", decode_0="sleeping", decode_1="sleeping")
        cluster.members["coordinator"].kill()
        port = cluster.target.rpartition(":")[2]
        again = ServiceProcess(
            "coordinator", ["coordinator", "--grpc-port", port, "--http-port", "off"], log_dir, {}
        )
        cluster.members["coordinator"] = again
        again.start()
        again.wait_event("coordinator.ready")
        async with cluster.client() as anew:
            await state(anew, prefill_0="ready", decode_0="ready", decode_1="sleeping")
            await asks(anew, 3)
        await cluster.assert_no_leaks()
