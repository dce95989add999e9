"""Workers stopped beyond every time limit and continued (failure case 8)."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from kv_transfer.handoff.messages import WRITE_GRACE_S
from splitserve.client import AsyncClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Info, Reading, busy, chunks_written, tokens, until, worker
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import SLACK_S

TICKET_S = 6.0
BLOCKS = 130
BLOCKS_OF_FROZEN = 63
"""Of 1000 tokens, 16 a block."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


@pytest.mark.slow
async def test_a_thawed_prefill_worker_writes_nothing_into_the_blocks_new_owners(log_dir: Path) -> None:
    options = ["--num-blocks", str(BLOCKS), "--max-step-tokens", "64", "--no-prefix-cache"]
    options += ["--simulated-prefill-token-s", "0.002", "--simulated-step-s", "0.06"]
    options += ["--ticket", str(TICKET_S), "--quarantine", "1", "--lease", "1", "--heartbeat", "0.1"]
    # Without admission, which would not fill the pool to the brim.
    at_coordinator = ["--heartbeat-timeout", "1", "--admission", "off"]
    cluster = Cluster(log_dir, prefill=2, worker_options=options, coordinator_options=at_coordinator)
    async with running(cluster), AsyncClient(cluster.target) as client:
        asked_s = time.monotonic()
        reading = Reading(client, tokens(1000, 1), max_tokens=4)
        info = await chunks_written(cluster)
        frozen = busy(info, "prefill")
        total_blocks = worker(info, "decode-0").total_blocks
        cluster.members[frozen].signal(signal.SIGSTOP)
        answer = await reading.task
        assert list(answer.token_ids) == expected_tokens(reading.prompt, 4)
        assert answer.served_by.prefill_worker != frozen

        # A frozen writer is not a dead one: its blocks are nobody's for as long as it may write.
        rest = total_blocks - BLOCKS_OF_FROZEN
        info = await until(
            cluster, lambda info: worker(info, "decode-0").free_blocks == rest, "it alone holds"
        )
        assert worker(info, "decode-0").quarantined_blocks == BLOCKS_OF_FROZEN
        await until(cluster, lambda info: _all_free(info, total_blocks), "time frees them")
        held_s = time.monotonic() - asked_s
        assert TICKET_S + WRITE_GRACE_S < held_s < TICKET_S + 2 * WRITE_GRACE_S + SLACK_S

        # Now every block has a new owner, and the frozen worker goes on in the middle of its chunk.
        owners = [Reading(client, tokens(190, 10 + n), max_tokens=100) for n in range(9)]
        for owner in owners:
            await owner.got(2)
        info = await until(
            cluster, lambda info: worker(info, "decode-0").free_blocks < 25, "the pool is full"
        )
        cluster.members[frozen].signal(signal.SIGCONT)
        for owner in owners:
            await owner.task
            assert owner.tokens == expected_tokens(owner.prompt, 100)

        await cluster.wait_ready()
        assert not cluster.members[frozen].process.poll()
        again = await asyncio.gather(*(client.generate(tokens(50, n), max_tokens=3) for n in range(20)))
        assert frozen in {answer.served_by.prefill_worker for answer in again}
        await cluster.assert_no_leaks()


def _all_free(info: Info, total_blocks: int) -> bool:
    decode = worker(info, "decode-0")  # without an id and figures while it is not registered
    return decode.free_blocks == total_blocks and not decode.quarantined_blocks


async def test_a_thawed_decode_worker_frees_everything_and_serves_again(log_dir: Path) -> None:
    options = ["--simulated-step-s", "0.02", "--heartbeat", "0.1", "--lease", "1"]
    # The one that is left may have no core for as long: then requests wait for it.
    at_coordinator = ["--heartbeat-timeout", "2", "--no-worker-wait", "60"]
    cluster = Cluster(log_dir, decode=2, worker_options=options, coordinator_options=at_coordinator)
    async with running(cluster), AsyncClient(cluster.target) as client:
        readings = [Reading(client, tokens(100, n), max_tokens=300) for n in range(4)]
        for reading in readings:
            await reading.got(5)
        cluster.members["decode-0"].signal(signal.SIGSTOP)
        await until(
            cluster, lambda info: not worker(info, "decode-0").worker_id, "the silent worker is dropped"
        )
        answers = [await reading.task for reading in readings]
        for reading in readings:
            assert reading.tokens == expected_tokens(reading.prompt, 300)
            assert reading.longest_gap_s() < SLACK_S
        assert {answer.served_by.decode_worker for answer in answers} == {"decode-1"}
        assert sum(answer.served_by.attempts for answer in answers) > len(answers)

        cluster.members["decode-0"].signal(signal.SIGCONT)
        await cluster.wait_ready()
        await cluster.assert_no_leaks()
        # Now it is the other one that is silent: beside it, which of both is chosen is a matter of predictions.
        cluster.members["decode-1"].signal(signal.SIGSTOP)
        await until(cluster, lambda info: not worker(info, "decode-1").worker_id, "the other one is dropped")
        more = await asyncio.gather(*(client.generate(tokens(90, 20 + n), max_tokens=20) for n in range(30)))
        assert {answer.served_by.decode_worker for answer in more} == {"decode-0"}
        for n, answer in enumerate(more):
            assert list(answer.token_ids) == expected_tokens(tokens(90, 20 + n), 20)
        cluster.members["decode-1"].signal(signal.SIGCONT)
        await cluster.wait_ready()
        await cluster.assert_no_leaks()


async def test_a_thawed_coordinator_keeps_its_workers_and_streams(log_dir: Path) -> None:
    """It has heard nobody for longer than its heartbeat timeout, which is its own doing."""
    options = ["--heartbeat", "0.1", "--simulated-step-s", "0.02", "--lease", "30"]
    cluster = Cluster(log_dir, worker_options=options, coordinator_options=["--heartbeat-timeout", "2"])
    async with running(cluster), AsyncClient(cluster.target) as client:
        readings = [Reading(client, tokens(50, n), max_tokens=150) for n in range(8)]
        for reading in readings:
            await reading.got(2)
        coordinator = cluster.members["coordinator"]
        coordinator.signal(signal.SIGSTOP)
        await asyncio.sleep(5.0)  # what is tested: a pause of several heartbeat timeouts
        coordinator.signal(signal.SIGCONT)
        for reading in readings:
            answer = await reading.task
            assert reading.tokens == expected_tokens(reading.prompt, 150)
            assert answer.served_by.attempts == 1
        assert "worker.dropped" not in coordinator.log_path.read_text()
        await cluster.assert_no_leaks()
