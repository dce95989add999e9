"""Workers killed in the middle of a request (failure cases 1, 2, 3), and aborts among neighbours (6)."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from kv_transfer.handoff.messages import WRITE_GRACE_S
from splitserve.client import AsyncClient
from splitserve.client.scaling_client import ScalingClient
from splitserve.errors import UnavailableError
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import (
    Reading,
    busy,
    decoding_worker,
    mid_prompt,
    timed,
    tokens,
    total,
    until,
    worker,
)
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S, SLACK_S

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
async def test_a_killed_decode_worker_is_resumed_and_a_lost_pool_is_typed(
    short_smollm2: str, log_dir: Path
) -> None:
    encode = load_tokenizer(short_smollm2).encode
    asks = [
        (encode(sentences(3 + n, seed=n)), {"max_tokens": 80, "ignore_eos": True, **sampling})
        for n, sampling in enumerate([{"temperature": 0.0}, {"temperature": 1.0, "seed": 11}] * 2)
    ]
    options = ["--dtype", "float32", "--num-blocks", "300", "--heartbeat", "0.1"]
    cluster = Cluster(log_dir, model=short_smollm2, engine="torch", decode=2, worker_options=options)
    async with running(cluster), AsyncClient(cluster.target) as client:
        undisturbed = await asyncio.gather(*(client.generate(prompt, **ask) for prompt, ask in asks))
        await until(cluster, lambda info: not total(info, "decode", "running_requests"), "all have ended")
        readings = [Reading(client, prompt, **ask) for prompt, ask in asks]
        victim, other = await busy_decode(cluster)
        cluster.members[victim].kill()
        answers = [await reading.task for reading in readings]
        assert [a.token_ids for a in answers] == [a.token_ids for a in undisturbed]
        assert [a.text for a in answers] == [a.text for a in undisturbed]
        assert max(a.served_by.attempts for a in answers) == 2
        assert max(reading.longest_gap_s() for reading in readings) < SLACK_S
        await cluster.assert_no_leaks()

        last = Reading(client, asks[0][0], max_tokens=200, ignore_eos=True, temperature=0.0)
        await last.got(3)
        cluster.members[other].kill()
        killed_s = time.monotonic()
        with pytest.raises(UnavailableError, match="decode"):
            await last.task
        assert time.monotonic() - killed_s < SLACK_S
        assert list(answers[0].token_ids[: len(last.tokens)]) == last.tokens[: len(answers[0].token_ids)]


async def busy_decode(cluster: Cluster) -> tuple[str, str]:
    """The first decode worker that is seen decoding, and the other one."""
    first = await decoding_worker(cluster)
    return first, "decode-1" if first == "decode-0" else "decode-0"


async def test_sixteen_streams_survive_a_killed_decode_worker(log_dir: Path) -> None:
    options = ["--simulated-step-s", "0.02", "--heartbeat", "0.1"]
    async with (
        running(Cluster(log_dir, decode=2, worker_options=options)) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        readings = [Reading(client, tokens(40 + 7 * n, n), max_tokens=300) for n in range(16)]
        for reading in readings:
            await reading.got(5)
        cluster.members["decode-0"].kill()
        answers = [await reading.task for reading in readings]
        for reading in readings:
            assert reading.tokens == expected_tokens(reading.prompt, 300)
            assert reading.longest_gap_s() < SLACK_S
        assert 0 < sum(answer.served_by.attempts > 1 for answer in answers) < 16
        await cluster.assert_no_leaks()


CHUNKS = ["--max-step-tokens", "64", "--simulated-prefill-token-s", "0.001", "--heartbeat", "0.1"]
"""A long prompt's chunk takes 64 ms, so between two reports at least one was computed and written."""


PROMPT_TOKENS = 2000


async def _mid_transfer(cluster: Cluster, client: AsyncClient, seed: int) -> tuple[Reading, str]:
    """A request whose first chunks were written, and the prefill worker that computes it."""
    reading, info = await mid_prompt(
        cluster, lambda n: Reading(client, tokens(PROMPT_TOKENS, seed + 10 * n), max_tokens=12)
    )
    return reading, busy(info, "prefill")


@pytest.mark.slow
async def test_a_prefill_worker_killed_mid_transfer(log_dir: Path) -> None:
    async with (
        running(Cluster(log_dir, prefill=2, worker_options=CHUNKS)) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        reading, victim = await _mid_transfer(cluster, client, 1)
        cluster.members[victim].kill()
        held = await until(
            cluster,
            lambda info: total(info, "decode", "quarantined_blocks"),
            "the dead writer's blocks are held",
        )
        assert worker(held, "decode-0").quarantined_blocks == PROMPT_TOKENS // 16
        freed_s = await timed(
            until(cluster, lambda info: not total(info, "decode", "quarantined_blocks"), "they come back")
        )
        assert freed_s < WRITE_GRACE_S + SLACK_S
        answer = await reading.task
        assert list(answer.token_ids) == expected_tokens(reading.prompt, 12)
        assert answer.served_by.attempts == 2
        assert answer.served_by.prefill_worker != victim
        await cluster.assert_no_leaks()

        alone, last = await _mid_transfer(cluster, client, 2)
        cluster.members[last].kill()
        killed_s = time.monotonic()
        with pytest.raises(UnavailableError, match="prefill"):
            await alone.task
        assert time.monotonic() - killed_s < SLACK_S
        await cluster.assert_no_leaks()


async def test_aborts_leave_neighbours_in_a_tiny_pool_alone(log_dir: Path) -> None:
    pick = random.Random(6)
    options = ["--num-blocks", "24", "--max-step-tokens", "32", "--simulated-prefill-token-s", "0.0005"]
    async with (
        running(Cluster(log_dir, worker_options=[*options, "--heartbeat", "0.1"])) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        readings = [Reading(client, tokens(pick.randint(90, 140), n), max_tokens=30) for n in range(60)]

        async def leave(reading: Reading, after_s: float) -> None:
            await asyncio.sleep(after_s)  # any moment of a request's life will do
            await reading.leave()

        leavers = pick.sample(readings, 25)
        await asyncio.gather(*(leave(reading, pick.uniform(0.05, 2.5)) for reading in leavers))
        await asyncio.wait([reading.task for reading in readings])
        assert sum(reading.task.cancelled() for reading in readings) > 10
        for reading in readings:
            whole = expected_tokens(reading.prompt, 30)
            assert reading.tokens == whole[: len(reading.tokens)]
            assert reading.task.cancelled() or len(reading.tokens) == 30
        await cluster.assert_no_leaks()


@pytest.mark.parametrize("activated", ["before it is too late", "later"])
async def test_the_only_worker_is_killed_beside_a_standby(activated: str, log_dir: Path) -> None:
    """A standby takes over by a plan alone: the stream goes on there if that comes in time, else it ends typed."""
    in_time = activated == "before it is too late"
    options = ["--simulated-step-s", "0.01", "--heartbeat", "0.1"]
    wait = ["--no-worker-wait", "20" if in_time else "0.3"]
    setup = Cluster(log_dir, both=1, worker_options=options, coordinator_options=wait)
    async with running(setup) as cluster, AsyncClient(cluster.target) as client:
        cluster.add_worker("both", "reserve", "--standby")
        await until(cluster, lambda info: worker(info, "reserve").state == "standby", "it stands by")
        # One that cannot go on never ends by itself.
        reading = Reading(client, tokens(60, 1), max_tokens=300 if in_time else 50_000)
        await reading.got(3)
        cluster.members["worker-0"].kill()
        await until(cluster, lambda info: not worker(info, "worker-0").address, "it is gone")
        if not in_time:
            for lost in (reading.task, client.generate(tokens(60, 2), max_tokens=4)):
                with pytest.raises(UnavailableError) as refused:
                    await lost
                assert refused.value.reason == "NO_WORKER"
            info = await client.server_info()
            assert [(one.worker_id, one.state) for one in info.workers] == [("reserve", "standby")]
        async with ScalingClient(cluster.target, timeout_s=PATIENCE_S) as scaling:
            await scaling.apply_plan(active=["reserve"])
        if in_time:
            answer = await reading.task
            assert reading.tokens == expected_tokens(reading.prompt, 300)
            assert answer.served_by.attempts == 2
        answer = await client.generate(tokens(60, 3), max_tokens=8)
        assert list(answer.token_ids) == expected_tokens(tokens(60, 3), 8)
        assert answer.served_by.decode_worker == "reserve"
        await cluster.assert_no_leaks()
