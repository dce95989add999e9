"""A real Prometheus answers every panel of the dashboards with data of a cluster under load, with real weights."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from dev.monitoring.dashboards import DASHBOARDS, FOLDER, dashboard_text
from dev.monitoring.panels import Panel
from splitserve.security.api_keys import key_hash, new_key
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.monitoring.prometheus import Prometheus, binaries, running_prometheus
from tests.support.waiting import PATIENCE_S

METRICS = ["--metrics-port", "0"]
POLICY = "{interval_s: 0.2, prefill: {target_ms: 500}, decode: {target_ms: 50}}"
JOBS = {
    "coordinator": "coordinator",
    "prefill-0": "prefill",
    "decode-0": "decode",
    "autoscaler": "autoscaler",
}
WITHOUT_DATA = {
    "GPU: time with a kernel": "needs a GPU",
    "GPU: memory in use": "needs a GPU",
    "GPU: power": "needs a GPU",
    "GPU: temperature": "needs a GPU",
    "Handoffs that failed or were refused": "no handoff of this test fails, and reasons have no series before",
}
DOCUMENTED = Path(__file__).parents[3] / "docs/reference/metrics.md"
SUFFIX = re.compile("_(bucket|sum|count)$")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def panels() -> Iterator[Panel]:
    for dashboard in DASHBOARDS:
        yield from dashboard.panels


def test_the_dashboards_are_up_to_date() -> None:
    written = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert written == {f"{one.uid}.json": dashboard_text(one) for one in DASHBOARDS}, "make docs"
    assert len({json.loads(text)["uid"] for text in written.values()}) == len(DASHBOARDS)


def test_panels_ask_for_documented_series_only() -> None:
    page = DOCUMENTED.read_text()
    for panel in panels():
        for query in panel.queries.values():
            for name in re.findall(r"\bsplitserve_\w+", query):
                assert f"`{SUFFIX.sub('', name)}`" in page, f"{panel.title}: {name}"


def test_each_panel_has_a_title_of_its_own() -> None:
    titles = [panel.title for panel in panels()]
    assert len(titles) == len(set(titles))
    assert WITHOUT_DATA.keys() <= set(titles)


@pytest.fixture
async def cluster(tmp_path: Path, short_smollm2: str) -> AsyncIterator[Cluster]:
    """1P+1D with real weights, a tenant, and an autoscaler; all with metrics."""
    key = new_key()
    files = {name: tmp_path / name for name in ("tenants.yaml", "policy.yaml", "key")}
    listed = [{"name": "root", "key_hashes": [key_hash(key)], "admin": True}]
    files["tenants.yaml"].write_text(yaml.safe_dump({"tenants": listed}))
    files["policy.yaml"].write_text(POLICY)
    files["key"].write_text(key)
    files["key"].chmod(0o600)
    made = Cluster(
        tmp_path,
        model=short_smollm2,
        engine="torch",
        worker_options=METRICS,
        coordinator_options=[*METRICS, *("--tenants", str(files["tenants.yaml"]))],
        api_key=key,
    )
    async with running(made):
        options = ["--policy", str(files["policy.yaml"]), "--coordinator", made.target]
        options += ["--api-key-file", str(files["key"])]
        autoscaler = ServiceProcess("autoscaler", ["autoscaler", *options, *METRICS], tmp_path)
        made.members["autoscaler"] = autoscaler
        autoscaler.start()
        await asyncio.to_thread(autoscaler.wait_event, "scaling.decided")
        yield made


async def test_every_panel_has_data(cluster: Cluster, tmp_path: Path) -> None:
    binaries()
    ports = {job: [cluster.members[name].wait_event("metrics.ready")["port"]] for name, job in JOBS.items()}
    ports["worker"] = []  # this cluster has no worker of role both
    async with running_prometheus(tmp_path, ports) as prometheus:
        missing = await _asked_under_load(cluster, prometheus)
        assert not missing
        deadline = time.monotonic() + PATIENCE_S
        # Of one that is evaluated for the first time it is not known.
        while bad := [rule for rule in await prometheus.rules() if rule["health"] != "ok"]:
            assert time.monotonic() < deadline, bad
            await asyncio.sleep(0.1)
        await cluster.assert_no_leaks()
        await _gone_with_its_worker(cluster, prometheus, ports["decode"][0])


async def _asked_under_load(cluster: Cluster, prometheus: Prometheus) -> dict[str, str]:
    """The queries that had no data, by panel and legend, when all had or patience was over."""
    deadline = time.monotonic() + PATIENCE_S
    missing = {
        f"{panel.title}: {legend}": query
        for panel in panels()
        if panel.title not in WITHOUT_DATA
        for legend, query in panel.queries.items()
    }
    async with cluster.client() as client:
        while missing and time.monotonic() < deadline:
            prompts = [
                [7] * 40,
                [7] * 40,
                *([number % 100 + 1 for number in range(tokens)] for tokens in (60, 600)),
            ]
            await asyncio.gather(*(client.generate(prompt, max_tokens=4) for prompt in prompts))
            missing = {name: query for name, query in missing.items() if not await prometheus.query(query)}
    return missing


async def _gone_with_its_worker(cluster: Cluster, prometheus: Prometheus, port: int) -> None:
    """A worker that left has no series any more, and its coordinator none of it."""
    worker = cluster.members["decode-0"]
    assert await prometheus.query("splitserve_decode_kv_usage_ratio")
    await asyncio.to_thread(worker.terminate)
    queries = (
        f'{{__name__=~"splitserve_.+", instance="127.0.0.1:{port}"}}',
        "splitserve_decode_kv_usage_ratio",
        'splitserve_replicas{role="decode"} > 0',
    )
    deadline = time.monotonic() + PATIENCE_S
    for query in queries:
        while await prometheus.query(query):
            assert time.monotonic() < deadline, query
            await asyncio.sleep(0.1)
