"""A 30k-token prompt among short chats (case 14), a client that stops reading (case 23)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from splitserve.client import AsyncClient
from splitserve.v1 import generation_pb2, inference_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.clients.traffic import REPEATS, Shape, Traffic, offer, rss_mb
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import tokens, until

pytestmark = [pytest.mark.timeout(150), pytest.mark.alone]
LONG, SHORT = Shape(30_000, 8), Shape(60, 16)
ENGINE = [
    "--simulated-step-s", "0.005", "--simulated-sequence-s", "0.0002", "--simulated-prefill-token-s", "0.00008",
    "--context-tokens", "40000", "--no-prefix-cache", "--heartbeat", "0.25",
]  # fmt: skip


async def test_long_prompts_among_short_chats(log_dir: Path) -> None:
    cluster = Cluster(log_dir, worker_options=ENGINE)
    async with running(cluster), AsyncClient(cluster.target) as client:
        await offer(client, 8, 2, SHORT, seed=1)
        for repeat in range(REPEATS):
            calm = await offer(client, 8, 5, SHORT, seed=2 + 10 * repeat)
            # Three long ones, 2.7 s of prefill each, come at once; shorter ones must not stand behind all of them.
            long = asyncio.create_task(offer(client, 1000, 0.003, LONG, seed=5))
            crowded = await offer(client, 8, 6, SHORT, seed=3 + 10 * repeat)
            longs = await long
            _report(calm, crowded)
            if _in_time(calm, crowded) and _long_ones_in_turn(longs):
                break
        print(f"{len(longs.outcomes)} long: TTFT up to {longs.ttft_s(1.0):.2f} s")
        assert len(longs.outcomes) >= 2
        assert not crowded.errors + longs.errors
        assert _in_time(calm, crowded)
        assert _long_ones_in_turn(longs)
        await cluster.assert_no_leaks()


def _in_time(calm: Traffic, crowded: Traffic) -> bool:
    """A chunk of the long prompt is half of a step of 46 ms; the short ones share the other half."""
    return crowded.ttft_s(0.99) < 0.5 and crowded.tpot_s(0.9) < 1.5 * calm.tpot_s(0.9) + 0.002


def _long_ones_in_turn(longs: Traffic) -> bool:
    """One worker computes one after the other, 2.7 s each, with a share for the short ones."""
    return longs.ttft_s(1.0) < 1.6 * 2.7 * len(longs.outcomes)


def _report(calm: Traffic, crowded: Traffic) -> None:
    for name, traffic in (("calm", calm), ("crowded", crowded)):
        print(
            f"{name}: TTFT p50 {traffic.ttft_s(0.5):.3f} p99 {traffic.ttft_s(0.99):.3f} s, "
            f"TPOT p50 {traffic.tpot_s(0.5) * 1e3:.1f} p99 {traffic.tpot_s(0.99) * 1e3:.1f} ms"
        )


@pytest.mark.slow
async def test_a_client_that_stops_reading(log_dir: Path) -> None:
    quick = ["--simulated-step-s", "0.002", "--simulated-sequence-s", "0", "--heartbeat", "0.25"]
    cluster = Cluster(log_dir, worker_options=quick)
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16)]
    async with running(cluster), AsyncClient(cluster.target) as client:
        await offer(client, 20, 2, SHORT, seed=1)
        before_mb = rss_mb(cluster)
        async with grpc.aio.insecure_channel(cluster.target, options=narrow) as channel:
            stub = InferenceServiceStub(channel)
            calls = []
            for number in range(8):
                stop = generation_pb2.StopParams(max_tokens=60_000, ignore_eos=True)
                ids = generation_pb2.TokenIds(ids=tokens(50, number))
                request = inference_pb2.GenerateRequest(token_ids=ids, stop=stop, timeout={"seconds": 14})
                call = stub.Generate(request)
                assert (await call.read()).HasField("delta")
                calls.append(call)
            for repeat in range(2):
                others = await offer(client, 10, 6 - 3 * repeat, SHORT, seed=2 + repeat)
                assert not others.errors
                if others.ttft_s(0.99) < 1.0:
                    break
            assert others.ttft_s(0.99) < 1.0
            grown_mb = rss_mb(cluster) - before_mb
            info = await client.server_info()
            print(f"{info.running_requests} clients do not read; the coordinator grew by {grown_mb:.1f} MB")
            assert info.running_requests == len(calls)
            assert grown_mb < 30
            # Their deadline ends them, though nothing more can be sent to them.
            await until(cluster, lambda info: info.running_requests == 0, "the deadline ends them")
            for call in calls:
                call.cancel()
        await cluster.assert_no_leaks()
