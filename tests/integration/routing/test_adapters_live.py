"""Adapters at a running cluster of simulated engines: names, tenants' rights, routing, blocks of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from autoscaler.signals.worker_view import with_served
from splitserve.client import AsyncClient
from splitserve.client.scaling_client import MAX_DEMAND_S, ScalingClient
from splitserve.errors import NotFoundError
from splitserve.security.api_keys import key_hash, new_key
from tests.support.cluster.ports import free_port
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, decoding_worker, tokens
from tests.support.lora import write_adapter
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

KEYS = {name: new_key() for name in ("alice", "bob", "root")}
TENANTS = {"alice": {"models": ["simulated", "red"]}, "bob": {"models": ["blue"]}, "root": {"admin": True}}
WEIGHTS = {"base_model.model.layer.lora_A.weight": np.ones((4, 8), np.float32)}


def adapter(folder: Path, name: str, **config: float) -> list[str]:
    return ["--adapter", f"{name}={write_adapter(folder / name, WEIGHTS, **config)}"]


@asynccontextmanager
async def adapters_cluster(folder: Path, **options: Any) -> AsyncIterator[Cluster]:
    """`red` on all workers, `blue` on `decode-0` only of the decode workers."""
    settings = ["--heartbeat", "0.1", "--lease", "5"]
    made = Cluster(folder, prefill=0, decode=0, worker_options=settings, **options)
    red, blue = adapter(folder, "red"), adapter(folder, "blue", lora_alpha=9)
    async with running(made) as cluster:
        cluster.add_worker("prefill", "prefill-0", *red, *blue)
        cluster.add_worker("decode", "decode-0", *red, *blue)
        cluster.add_worker("decode", "decode-1", *red)
        await cluster.wait_ready(prefill=1, decode=2)
        yield cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with adapters_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
async def shared_cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """With tenants, and over HTTP as well."""
    listed = [{"name": name, "key_hashes": [key_hash(KEYS[name])], **rest} for name, rest in TENANTS.items()]
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(yaml.safe_dump({"tenants": listed}))
    options = ["--tenants", str(tenants)]
    async with adapters_cluster(
        tmp_path, coordinator_options=options, api_key=KEYS["root"], http=True
    ) as cluster:
        yield cluster


def client_of(cluster: Cluster, tenant: str) -> AsyncClient:
    return AsyncClient(cluster.target, api_key=KEYS[tenant])


async def test_names_rights_and_workers(shared_cluster: Cluster) -> None:
    cluster = shared_cluster
    async with client_of(cluster, "alice") as alice, client_of(cluster, "bob") as bob:
        assert {model.name: model.parent for model in await alice.models()} == {
            "simulated": "",
            "red": "simulated",
        }
        assert {model.name: model.parent for model in await bob.models()} == {"blue": ""}
        for name in ("blue", "nonsense"):
            with pytest.raises(NotFoundError) as caught:
                await alice.generate(tokens(40, 1), model=name, max_tokens=2)
            assert caught.value.reason == "MODEL_NOT_FOUND"
        for seed in range(6):
            answer = await bob.generate(tokens(40, seed), model="blue", max_tokens=4)
            assert answer.served_by.decode_worker == "decode-0"
            assert answer.model == "blue"
        whole = tokens(100, 9)
        cached = []
        for name in ("simulated", "red", "red", "simulated"):
            answer = await alice.generate(whole, model=name, max_tokens=4)
            cached.append(answer.usage.cached_prompt_tokens)
        assert cached == [0, 0, 96, 96]
    key = {"authorization": f"Bearer {KEYS['root']}"}
    async with httpx.AsyncClient(headers=key, timeout=PATIENCE_S) as http:
        shown = (await http.get(f"{cluster.base_url}/models")).json()["data"]
        metrics = (await http.get(cluster.base_url.replace("/v1", "/metrics"))).text
    assert [(one["id"], one["root"], one["parent"]) for one in shown] == [
        ("blue", "simulated", "simulated"),
        ("red", "simulated", "simulated"),
        ("simulated", "simulated", None),
    ]
    assert 'model="blue"' in metrics
    await cluster.assert_no_leaks()


async def test_an_answer_goes_on_at_another_worker_with_the_adapter(cluster: Cluster) -> None:
    options = {"model": "red", "max_tokens": 1000, "ignore_eos": True}
    async with AsyncClient(cluster.target) as client:
        undisturbed = await client.generate(tokens(60, 5), **options)  # type: ignore[arg-type]
        await cluster.assert_no_leaks()  # so that loads seen below are those of the next answer
        reading = Reading(client, tokens(60, 5), **options)
        await reading.got(5)
        busy = await decoding_worker(cluster)
        cluster.members[busy].kill()
        answer = await reading.task
    assert answer.token_ids == undisturbed.token_ids
    assert answer.served_by.attempts > 1
    await cluster.assert_no_leaks()


async def test_a_worker_with_other_files_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    other = adapter(tmp_path / "other", "red", lora_alpha=10)
    refused = cluster.add_worker("decode", "decode-2", *other)
    assert refused.process.wait(PATIENCE_S) == 1
    assert "error: model.adapters: 'red' is an adapter with other files on" in refused.log_tail()
    async with AsyncClient(cluster.target) as client:
        assert "decode-2" not in {worker.worker_id for worker in (await client.server_info()).workers}


async def test_one_that_a_coordinator_has_never_seen_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    """As after its restart at zero: the autoscaler tells it what it had, and a name that nobody had is not found."""
    port = free_port()
    other = ServiceProcess("other", ["coordinator", "--grpc-port", str(port), "--http-port", "off"], tmp_path)
    other.start()
    try:
        other.wait_event("coordinator.ready")
        target = f"127.0.0.1:{port}"
        async with (
            ScalingClient(cluster.target, timeout_s=PATIENCE_S) as ours,
            ScalingClient(target, timeout_s=PATIENCE_S) as theirs,
            AsyncClient(target) as client,
        ):
            served = with_served({}, (await ours.signals()).models)
            await theirs.apply_plan(on_demand=served.values())
            with pytest.raises(NotFoundError) as caught:
                await client.generate(tokens(40, 1), model="green", max_tokens=2)
            assert caught.value.reason == "MODEL_NOT_FOUND"
            waiting = asyncio.create_task(client.generate(tokens(40, 1), model="blue", max_tokens=2))
            assert await theirs.demand("simulated", MAX_DEMAND_S), "it wakes the pools"
            files = ["--adapter", f"blue={tmp_path / 'blue'}", "--coordinator", target]
            cluster.add_worker("prefill", "prefill-9", *files)
            cluster.add_worker("decode", "decode-9", *files)
            assert (await waiting).served_by.decode_worker == "decode-9"
    finally:
        other.terminate()
    await cluster.assert_no_leaks()
