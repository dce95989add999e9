"""A decode worker that the coordinator cannot reach for a while: reset connections, long steps, pauses."""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from pathlib import Path

import pytest

from bench.tcp_proxy import TcpProxy, tcp_proxy
from splitserve.client import AsyncClient
from tests.support.cluster.real_cluster import Cluster, proxied, running
from tests.support.cluster.streams import Reading, eventually, tokens, until, worker
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(90)
TOO_LONG = 100_000
"""Tokens that nobody waits for: an hour of decoding."""


def handoffs(cluster: Cluster, name: str) -> float:
    """Handoffs that a worker has completed since its start, from its metrics."""
    port = cluster.members[name].wait_event("metrics.ready")["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        lines = page.read().decode().splitlines()
    series = "splitserve_handoffs_completed_total "
    return next(float(line.removeprefix(series)) for line in lines if line.startswith(series))


def count_events(cluster: Cluster, name: str, event: str) -> int:
    return sum(entry.get("event") == event for entry in cluster.members[name].events())


async def reset(cluster: Cluster, proxy: TcpProxy) -> None:
    """Resets the connections and waits until the output stream is open again."""
    opened = count_events(cluster, "coordinator", "outputs.open")
    proxy.reset()
    await eventually(
        lambda: count_events(cluster, "coordinator", "outputs.open") > opened, "the stream is open again"
    )


@pytest.mark.slow
async def test_streams_go_on_through_reset_connections_without_a_prefill(log_dir: Path) -> None:
    options = ["--simulated-step-s", "0.02", "--heartbeat", "0.1", "--metrics-port", "0"]
    cluster = Cluster(log_dir, decode=0, worker_options=options)
    async with proxied(cluster) as proxy, AsyncClient(cluster.target) as client:
        readings = [Reading(client, tokens(40 + 9 * n, n), max_tokens=240) for n in range(6)]
        for count in (5, 60, 120):
            for reading in readings:
                await reading.got(count)
            await reset(cluster, proxy)
        answers = [await reading.task for reading in readings]
        for reading in readings:
            assert reading.tokens == expected_tokens(reading.prompt, 240)
        assert {answer.served_by.attempts for answer in answers} == {1}
        assert count_events(cluster, "coordinator", "request.resumed") == 0
        assert handoffs(cluster, "prefill-0") == handoffs(cluster, "decode-0") == len(readings)
        assert count_events(cluster, "coordinator", "outputs.broken") >= 3
        await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_streams_go_on_when_the_connection_for_reports_is_reset(log_dir: Path) -> None:
    options = ["--simulated-step-s", "0.02", "--heartbeat", "0.1"]
    cluster = Cluster(log_dir, decode=0, worker_options=options)
    try:
        await cluster.start(wait_ready=False)
        async with tcp_proxy(int(cluster.target.rpartition(":")[2])) as proxy:
            cluster.parts_target = f"127.0.0.1:{proxy.port}"
            cluster.add_worker("decode", "decode-0")
            await cluster.wait_ready(1, 1)
            async with AsyncClient(cluster.target) as client:
                reading = Reading(client, tokens(40, 1), max_tokens=200)
                await reading.got(5)
                before = count_events(cluster, "decode-0", "registry.registered")
                proxy.reset()
                await eventually(
                    lambda: count_events(cluster, "decode-0", "registry.registered") > before, "registered"
                )
                answer = await reading.task
                assert reading.tokens == expected_tokens(reading.prompt, 200)
                assert answer.served_by.attempts == 1
                again = await client.generate(tokens(40, 2), max_tokens=5)
                assert again.served_by.attempts == 1
            await cluster.assert_no_leaks()
    except BaseException:
        cluster.tell_state()
        raise
    finally:
        cluster.stop()


@pytest.mark.slow
async def test_a_client_that_leaves_while_the_connection_is_reset_is_not_decoded_for(log_dir: Path) -> None:
    options = ["--simulated-step-s", "0.02", "--heartbeat", "0.1"]
    cluster = Cluster(log_dir, decode=0, worker_options=options)
    async with proxied(cluster) as proxy, AsyncClient(cluster.target) as client:
        leaving = Reading(client, tokens(60, 1), max_tokens=TOO_LONG)
        staying = Reading(client, tokens(60, 2), max_tokens=200)
        for reading in (leaving, staying):
            await reading.got(5)
        proxy.reset()
        await leaving.leave()
        await staying.task
        assert staying.tokens == expected_tokens(staying.prompt, 200)
        await cluster.assert_no_leaks()


async def test_a_client_that_leaves_a_stopped_worker_is_not_decoded_for(log_dir: Path) -> None:
    options = ["--simulated-step-s", "0.02", "--heartbeat", "0.1"]
    patient = ["--heartbeat-timeout", "60"]
    cluster = Cluster(log_dir, worker_options=options, coordinator_options=patient)
    async with running(cluster), AsyncClient(cluster.target) as client:
        reading = Reading(client, tokens(60, 1), max_tokens=TOO_LONG)
        await reading.got(5)
        cluster.members["decode-0"].signal(signal.SIGSTOP)
        await reading.leave()
        # The call that should have ended it has been given up.
        await asyncio.to_thread(cluster.members["coordinator"].wait_event, "abort.failed")
        cluster.members["decode-0"].signal(signal.SIGCONT)
        await cluster.assert_no_leaks()
        assert worker(await until(cluster, lambda _: True, "it is there"), "decode-0").worker_id


@pytest.mark.slow
async def test_a_client_that_leaves_during_a_long_step_is_not_decoded_for(log_dir: Path) -> None:
    options = ["--simulated-step-s", "3", "--heartbeat", "0.1"]
    async with running(Cluster(log_dir, worker_options=options)) as cluster:
        async with AsyncClient(cluster.target) as client:
            reading = Reading(client, tokens(60, 1), max_tokens=TOO_LONG)
            await reading.got(2)
            await reading.leave()
        await cluster.assert_no_leaks()
