"""Spot notices: a worker's machine is taken away. What ends in time stays, the rest moves, nothing fails."""

from __future__ import annotations

import asyncio
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.health.notice_moves import MARGIN_S
from splitserve.client import AsyncClient
from splitserve.errors import UnavailableError
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, busy, mid_prompt, tokens, until, worker
from tests.support.engine.simulated_tokens import expected_tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

OPTIONS = ["--simulated-step-s", "0.02", "--heartbeat", "0.1"]
NOTICE_S = MARGIN_S + 2.0
SHORT, LONG = 30, 300


async def test_short_answers_stay_and_long_ones_move_before_the_worker_dies(log_dir: Path) -> None:
    """The second notice says that the machine ends sooner than the first did."""
    options, notice = [*OPTIONS, "--spot-notice", "90"], log_dir / "notice"
    cluster = Cluster(log_dir, worker_options=options)
    async with running(cluster), AsyncClient(cluster.target) as client:
        cluster.add_worker("decode", "decode-1", "--spot-file", str(notice))
        await cluster.wait_ready(decode=2)
        short = [Reading(client, tokens(30 + n, n), max_tokens=SHORT) for n in range(4)]
        long = [Reading(client, tokens(60 + n, n), max_tokens=LONG) for n in range(8)]
        for reading in short + long:
            await reading.got(2)
        cluster.members["decode-1"].signal(signal.SIGUSR1)
        info = await until(cluster, lambda info: worker(info, "decode-1").state == "draining", "it is known")
        assert 60 < worker(info, "decode-1").preempted_in_seconds <= 90
        assert not worker(info, "decode-0").HasField("preempted_in_seconds")
        noticed_s = time.monotonic()
        notice.write_text((datetime.now(UTC) + timedelta(seconds=NOTICE_S)).isoformat(), encoding="utf-8")
        await until(
            cluster,
            lambda info: worker(info, "decode-1").preempted_in_seconds <= NOTICE_S,
            "the second is heard",
        )
        later = [Reading(client, tokens(90 + n, n), max_tokens=SHORT) for n in range(4)]
        await until(
            cluster,
            lambda info: not worker(info, "decode-1").running_requests,
            "all have left before its end",
        )
        cluster.members["decode-1"].kill()
        answers = [await reading.task for reading in short + long + later]
        for reading, answer in zip(short + long + later, answers, strict=True):
            assert reading.tokens == expected_tokens(reading.prompt, LONG if reading in long else SHORT)
            # Where the machine stood still, a short one may have been late for the worker's end, too.
            in_time = reading.times[-1] < noticed_s + NOTICE_S - MARGIN_S - 1
            assert answer.served_by.attempts == 1 or reading in long or not in_time
        assert 0 < sum(answer.served_by.attempts == 2 for answer in answers) < len(long)
        assert all(answer.served_by.decode_worker == "decode-0" for answer in answers[-4:])
        await cluster.assert_no_leaks()


async def test_a_prompt_moves_and_the_last_worker_of_a_pool_keeps_what_it_has(log_dir: Path) -> None:
    options = [
        *OPTIONS,
        "--max-step-tokens",
        "64",
        "--simulated-prefill-token-s",
        "0.001",
        "--spot-notice",
        "2",
    ]
    cluster = Cluster(log_dir, prefill=2, worker_options=options)
    async with running(cluster), AsyncClient(cluster.target) as client:
        # It takes 2 s.
        prompt, info = await mid_prompt(
            cluster, lambda n: Reading(client, tokens(2000, 10 + n), max_tokens=5)
        )
        left = busy(info, "prefill")
        cluster.members[left].signal(signal.SIGUSR1)
        answer = await prompt.task
        assert prompt.tokens == expected_tokens(prompt.prompt, 5)
        assert answer.served_by.attempts == 2
        assert answer.served_by.prefill_worker != left

        stream = Reading(client, tokens(40, 3), max_tokens=LONG)
        await stream.got(2)
        cluster.members["decode-0"].signal(signal.SIGUSR1)
        assert (await stream.task).served_by.attempts == 1
        assert stream.tokens == expected_tokens(stream.prompt, LONG)
        told = cluster.members["coordinator"]
        await asyncio.to_thread(told.wait_event, "notice.stuck")
        stuck = [event for event in told.events() if event["event"] == "notice.stuck"]
        assert [event["worker_id"] for event in stuck] == ["decode-0"]
        with pytest.raises(UnavailableError):
            await client.generate(tokens(20, 4), max_tokens=2)
        await cluster.assert_no_leaks()
