"""A worker that one of its coordinators refuses serves the others, and is back once it is let in."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from tests.support.cluster.ports import free_port
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, eventually, tokens
from tests.support.waiting import PATIENCE_S

TOKEN = "the-token-of-this-cluster"
OTHER_TOKEN = "a-token-that-nobody-has"

pytestmark = pytest.mark.timeout(240)


def series(worker: ServiceProcess, name: str) -> dict[str, float]:
    """Values by coordinator."""
    port = worker.wait_event("metrics.ready")["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        lines = page.read().decode().splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in found}


async def test_a_rotated_token_at_one_of_two_coordinators(log_dir: Path, tmp_path: Path) -> None:
    token, others_token = tmp_path / "token", tmp_path / "others-token"
    token.write_text(TOKEN)
    others_token.write_text(TOKEN)
    port = free_port()
    arguments = ["coordinator", "--grpc-port", str(port), "--http-port", "off"]
    other = ServiceProcess("other", [*arguments, "--cluster-token-file", str(others_token)], log_dir)
    target = f"127.0.0.1:{port}"
    secret = ["--cluster-token-file", str(token)]
    options = [*secret, "--coordinator", target, "--metrics-port", "0", "--simulated-step-s", "0.01"]
    cluster = Cluster(log_dir, worker_options=options, coordinator_options=secret)
    other.start()
    try:
        other.wait_event("coordinator.ready")
        async with running(cluster), AsyncClient(target) as theirs, AsyncClient(cluster.target) as ours:
            workers = [cluster.members["prefill-0"], cluster.members["decode-0"]]
            await theirs.wait_ready(PATIENCE_S)
            reading = Reading(ours, tokens(20, 1), max_tokens=100_000, ignore_eos=True)
            await reading.got(3)
            other.kill()
            others_token.write_text(OTHER_TOKEN)
            other.start()
            for worker in workers:
                refused = await asyncio.to_thread(worker.wait_event, "registry.refused")
                assert (refused["coordinator"], refused["reason"]) == (target, "CLUSTER_TOKEN")
                assert refused["level"] == "error"
                assert (await asyncio.to_thread(series, worker, "splitserve_registry_refusals_total"))[
                    target
                ] >= 1
                registered = await asyncio.to_thread(series, worker, "splitserve_registered")
                assert registered == {cluster.target: 1.0, target: 0.0}
                assert not any(entry["event"] == "worker.draining" for entry in worker.events())
            before = len(reading.tokens)
            await reading.got(before + 20)
            assert len((await ours.generate(tokens(20, 2), max_tokens=5)).token_ids) == 5
            # The token is put right, and both are back.
            other.kill()
            others_token.write_text(TOKEN)
            other.start()
            await theirs.wait_ready(PATIENCE_S)
            assert len((await theirs.generate(tokens(20, 3), max_tokens=5)).token_ids) == 5
            await reading.leave()
            await cluster.assert_no_leaks()
    finally:
        other.terminate()


async def test_a_worker_that_all_refuse_ends_and_one_that_waits_for_an_answer_does_not(
    log_dir: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(OTHER_TOKEN)
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    async with running(
        Cluster(
            log_dir,
            coordinator_options=["--cluster-token-file", str(secret)],
            worker_options=["--cluster-token-file", str(secret)],
        )
    ) as cluster:
        nobody = f"127.0.0.1:{free_port()}"
        common = ["--cluster-token-file", str(wrong)]
        lost = cluster.add_worker("decode", "lost", *common)
        waiting = cluster.add_worker("decode", "waiting", *common, "--coordinator", nobody)
        assert await asyncio.to_thread(lost.process.wait, PATIENCE_S) != 0
        assert "cluster token" in lost.log_tail()
        assert "Traceback" not in lost.log_tail()
        await eventually(
            lambda: sum(entry["event"] == "registry.refused" for entry in waiting.events()) >= 3,
            "three tries",
        )
        assert waiting.process.poll() is None
        assert waiting.terminate() == 0
        await cluster.assert_no_leaks()
