"""The page's data over HTTP: credentials, headers, hostile names, bounds, an autoscaler's reasons."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from coordinator.entrypoints.page import endpoints
from splitserve.security.api_keys import key_hash, new_key
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.clients.patient import PatientClient, PatientScalingClient
from tests.support.cluster.fake_cluster import FakeCluster, ask, fake_cluster
from tests.support.waiting import PATIENCE_S

KEYS = {name: new_key() for name in ("alice", "root")}
TOKEN = "a-token-of-more-than-16-characters"
HOSTILE = "<img src=x onerror=alert(1)>&\"'\u202e"
DATA = ("/page/snapshot", "/page/history", "/page/request/unknown")

pytestmark = pytest.mark.timeout(240)


@asynccontextmanager
async def paged(**config: Any) -> AsyncIterator[tuple[FakeCluster, httpx.AsyncClient]]:
    async with fake_cluster(http_port=0, **config) as cluster:
        base_url = f"http://127.0.0.1:{cluster.coordinator.http_port}"
        async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S) as http:
            yield cluster, http


def rows(snapshot: dict[str, Any]) -> dict[str, dict[str, Any]]:
    columns = snapshot["workers"]["columns"]
    found = [dict(zip(columns, row, strict=True)) for row in snapshot["workers"]["rows"]]
    return {worker["id"]: worker for worker in found}


async def asked(http: httpx.AsyncClient, path: str = "/page/snapshot") -> dict[str, Any]:
    answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_every_response_has_the_security_headers() -> None:
    async with paged() as (_, http):
        for path in ("/", "/page/static/main.js", "/page/static/none.js", "/page/access", *DATA):
            answer = await http.get(path)
            assert answer.headers["x-content-type-options"] == "nosniff", path
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            if path in DATA:
                assert answer.headers["cache-control"] == "no-store"
        index = await http.get("/")
        assert index.headers["content-type"].startswith("text/html")
        assert (await http.post("/page/snapshot")).status_code == 405


async def test_a_snapshot_shows_workers_requests_and_flows() -> None:
    async with paged() as (cluster, http):
        await cluster.answer(ask(request_id="seen"))
        snapshot = await asked(http)
        assert {name: worker["role"] for name, worker in rows(snapshot).items()} == {
            "p0": "prefill",
            "d0": "decode",
        }
        assert rows(snapshot)["d0"]["total_blocks"] == 128
        assert [one["request_id"] for one in snapshot["requests"]["recent"]] == ["seen"]
        record = await asked(http, "/page/request/seen")
        assert record["outcome"] == "completed"
        assert record["phases"]
        assert (await http.get("/page/request/unknown")).status_code == 404
        assert (await http.get("/page/request/a%20b")).status_code == 400


async def test_one_snapshot_is_shared_until_workers_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "SNAPSHOT_S", 3600.0)
    monkeypatch.setattr(endpoints, "CHANGED_S", 0.0)
    async with paged() as (cluster, http):
        shown = {}
        async with asyncio.timeout(PATIENCE_S):
            # A worker's first reports may change it: that it reaches its peers, for one.
            while (await asked(http))["at"] != shown.get("at"):
                shown = await asked(http)
        version = cluster.coordinator.registry.version
        await cluster.add_decode("d1")
        await cluster.coordinator.registry.wait_until(
            lambda: cluster.coordinator.registry.version != version, PATIENCE_S
        )
        assert "d1" in rows(await asked(http))
        await cluster.all_ready()


async def test_hostile_names_stay_data() -> None:
    async with paged(prefill=0, decode=0) as (cluster, http):
        await cluster.add_decode("d0", model=HOSTILE)
        await cluster.add_prefill("p0", model=HOSTILE)
        await cluster.all_ready()
        await cluster.answer(ask(model=HOSTILE))
        snapshot = await asked(http)
        assert snapshot["workers"]["rows"][0][2] == HOSTILE
        assert snapshot["requests"]["recent"]
        answer = await http.get("/page/snapshot")
        assert answer.headers["content-type"] == "application/json"


async def test_switched_off_it_is_not_there() -> None:
    async with paged(page="off") as (_, http):
        for path in ("/", "/page/static/main.js", "/page/access", *DATA):
            assert (await http.get(path)).status_code == 404, path
        assert (await http.get("/health")).status_code == 200


async def test_a_foreign_name_that_leads_here_gets_no_data() -> None:
    async with paged() as (_, http):
        for path in DATA:
            answer = await http.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 403, path
        shown = (await http.get("/page/access", headers={"host": "evil.example"})).json()
        assert (shown["admitted"], shown["asks_for"]) == (False, None)


async def test_the_token_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    async with paged(page_token_file=path) as (_, http):
        shown = (await http.get("/page/access")).json()
        assert (shown["admitted"], shown["asks_for"]) == (False, "token")
        assert (await http.get("/")).status_code == 200
        for path_of_data in DATA:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                assert (await http.get(path_of_data, headers=headers)).status_code == 401
        http.headers["authorization"] = f"Bearer {TOKEN}"
        assert (await asked(http, "/page/access"))["admitted"] is True
        assert rows(await asked(http)).keys() == {"p0", "d0"}


async def test_with_tenants_it_takes_an_admins_key(tmp_path: Path) -> None:
    tenants = [{"name": name, "key_hashes": [key_hash(KEYS[name])], "admin": name == "root"} for name in KEYS]
    path = tmp_path / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": tenants}))
    async with paged(tenants=path) as (cluster, http):
        async with PatientClient(cluster.address, api_key=KEYS["alice"]) as alice:
            await alice.generate("w1 w2", max_tokens=2, request_id="hers")
        for name in DATA:
            assert (await http.get(name)).status_code == 401, name
        http.headers["authorization"] = f"Bearer {KEYS['alice']}"
        for name in DATA[:2]:
            assert (await http.get(name)).status_code == 403, name
        shown = await asked(http, "/page/access")
        assert (shown["asks_for"], shown["admitted"]) == ("api_key", False)
        assert (await asked(http, "/page/request/hers"))["tenant"] == "alice"
        http.headers["authorization"] = f"Bearer {KEYS['root']}"
        assert [one["request_id"] for one in (await asked(http))["requests"]["recent"]] == ["hers"]


async def test_it_shows_why_the_autoscaler_wants_what_it_wants() -> None:
    async with paged() as (cluster, http), PatientScalingClient(cluster.address) as scaling:
        assert (await asked(http))["scaling"]["latest"] == []
        decision = scaling_pb2.PoolDecision(
            pool=registry_pb2.POOL_DECODE,
            desired=2,
            ready=1,
            cause="policy",
            reason=HOSTILE,
            next_actions=["start 1"],
        )
        await scaling.apply_plan(valid_s=PATIENCE_S, decisions=[decision])
        shown = await _until(http, lambda snapshot: snapshot["scaling"]["latest"])
        (latest,) = shown["scaling"]["latest"]
        assert (latest["pool"], latest["desired"], latest["reason"]) == ("decode", 2, HOSTILE)
        assert (latest["cause"], latest["actions"]) == ("policy", ["start 1"])
        assert shown["scaling"]["entries"] == [latest]


async def _until(http: httpx.AsyncClient, condition: Any) -> dict[str, Any]:
    """The first snapshot for which the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition(snapshot := await asked(http)):
        assert time.monotonic() < deadline, snapshot
        await asyncio.sleep(0.05)
    return snapshot
