"""Completions dropped, duplicated, reordered and delayed (failure case 9)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.attempt import ADMIT_WAIT_S
from kv_transfer.handoff.messages import WRITE_GRACE_S
from splitserve.client import AsyncClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, chunks_written, tokens, until, worker
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import SLACK_S

TICKET_S = 3.0

pytestmark = pytest.mark.timeout(90)


def _cluster(log_dir: Path, faults: dict[str, Any], *options: str) -> Cluster:
    return Cluster(log_dir, worker_options=["--heartbeat", "0.1", *options], faults=faults)


@pytest.mark.slow
async def test_dropped_notifications_hold_blocks_for_a_bounded_time(log_dir: Path) -> None:
    options = ["--max-step-tokens", "64", "--simulated-prefill-token-s", "0.001"]
    options += ["--ticket", str(TICKET_S), "--quarantine", "1"]
    async with (
        running(_cluster(log_dir, {"drop_notification": {"at": [1, 2]}}, *options)) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        # The first one lost is the word that nothing will be written any more.
        left = Reading(client, tokens(3200, 1), max_tokens=4)
        await chunks_written(cluster)
        await left.leave()
        began_s = time.monotonic()
        await until(cluster, lambda info: worker(info, "decode-0").quarantined_blocks == 200, "quarantine")

        # The second one is a completion: the request goes on, and its blocks are free at once.
        asked_s = time.monotonic()
        reading = Reading(client, tokens(200, 2), max_tokens=20)
        answer = await reading.task
        assert reading.tokens == expected_tokens(reading.prompt, 20)
        assert answer.served_by.attempts == 2
        assert reading.times[1] - asked_s > ADMIT_WAIT_S
        assert reading.longest_gap_s() < ADMIT_WAIT_S + SLACK_S
        info = await until(
            cluster, lambda info: not worker(info, "decode-0").reserved_blocks, "nothing reserved"
        )
        assert worker(info, "decode-0").quarantined_blocks in (0, 200)

        await until(cluster, lambda info: not worker(info, "decode-0").quarantined_blocks, "time ends it")
        assert time.monotonic() - began_s < TICKET_S + 2 * WRITE_GRACE_S + SLACK_S
        await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_a_write_that_failed_half_way_holds_its_blocks_until_the_tickets_deadline(
    log_dir: Path,
) -> None:
    options = ["--max-step-tokens", "64", "--ticket", str(TICKET_S), "--quarantine", "1"]
    async with (
        running(_cluster(log_dir, {"unclean_write": {"at": [2]}}, *options)) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        began_s = time.monotonic()
        prompt = tokens(320, 1)
        answer = await client.generate(prompt, max_tokens=4)
        assert list(answer.token_ids) == expected_tokens(prompt, 4)
        assert answer.served_by.attempts == 2
        # The writer lives and could say at once that it posts nothing more; but bytes may be on their way.
        await until(cluster, lambda info: worker(info, "decode-0").quarantined_blocks, "a heartbeat tells it")
        await until(cluster, lambda info: not worker(info, "decode-0").quarantined_blocks, "time ends it")
        assert time.monotonic() - began_s > TICKET_S + WRITE_GRACE_S
        await cluster.assert_no_leaks()


@pytest.mark.parametrize(
    ("faults", "rejected"),
    [
        ({"duplicate_notification": {"every": 1}}, 30),
        ({"duplicate_arrival": {"every": 1}, "delay_arrival": {"every": 2}, "hold_s": 0.4}, 30),
        ({"reorder_notification": {"probability": 0.5}, "hold_s": 0.4, "seed": 1}, 0),
        ({"delay_notification": {"probability": 0.5}, "late_write": {"every": 3}, "hold_s": 0.4}, 0),
    ],
    ids=["duplicated", "duplicated and delayed on arrival", "reordered", "delayed"],
)
async def test_odd_notifications_change_no_answer(
    log_dir: Path, faults: dict[str, Any], rejected: int
) -> None:
    async with (
        running(_cluster(log_dir, faults, "--max-step-tokens", "64")) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        prompts = [tokens(20 + 13 * n, n) for n in range(30)]
        answers = await asyncio.gather(*(client.generate(prompt, max_tokens=10) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.token_ids) == expected_tokens(prompt, 10)
            assert answer.served_by.attempts == 1
        await cluster.assert_no_leaks()
        await until(
            cluster, lambda info: worker(info, "decode-0").rejected_handoffs == rejected, "all are counted"
        )
