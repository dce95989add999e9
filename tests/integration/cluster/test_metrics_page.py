"""docs/reference/metrics.md lists what the processes serve: each series with its type and labels, and nothing else."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from splitserve.security.api_keys import key_hash, new_key
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S, SLACK_S
from worker.gpu_metrics import READINGS

PAGE = Path(__file__).parents[3] / "docs/reference/metrics.md"
SECTIONS = ("The coordinator's series", "A worker's series", "The autoscaler's series")
EVERYWHERE = "In every process, autoscaler and workers included:"
POLICY = "{interval_s: 0.2, prefill: {target_ms: 500}, decode: {target_ms: 50}}"
NOT_SERVED_HERE = {
    **dict.fromkeys(
        ("splitserve_canary_answers_total", "splitserve_canary_wrong_pairs"), "needs the canary, which is off"
    ),
    **dict.fromkeys(READINGS, "needs a GPU: tests/unit/worker/test_worker_metrics.py"),
}

Series = dict[str, tuple[str, frozenset[str]]]
"""Type and labels by name."""


def documented(text: str) -> Series:
    """The series in the tables of a part of the page."""
    found: Series = {}
    for row in re.findall(r"^\| (`splitserve_.*?) \| (.*?) \|", text, re.MULTILINE):
        names, (kinds, _, labels) = re.findall(r"`(.*?)`", row[0]), row[1].partition(";")
        of_each = re.findall("counter|gauge|histogram", kinds)
        for name, kind in zip(names, of_each * (len(names) if len(of_each) == 1 else 1), strict=True):
            found[name] = kind, frozenset(re.findall(r"`(.*?)`", labels))
    return found


def section(title: str) -> Series:
    """What one kind of process serves, by the page."""
    page = PAGE.read_text()
    own = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    shared = page.partition(EVERYWHERE)[2].partition("\n## ")[0]
    return documented(own) | documented(shared)


def served(process: ServiceProcess) -> Series:
    """What a process serves; labels are known of series that have a value."""
    port = process.wait_event("metrics.ready")["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {
            f"{family.name}_total" if family.type == "counter" else family.name: (
                family.type,
                frozenset(name for sample in family.samples for name in sample.labels if name != "le"),
            )
            for family in families
        }


@pytest.fixture(scope="module")
async def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Series]:
    """What each process of a cluster with tenants serves after a few requests, by the section of the page."""
    folder, key = tmp_path_factory.mktemp("logs"), new_key()
    tenants, policy, key_file = folder / "tenants.yaml", folder / "policy.yaml", folder / "key"
    listed = [{"name": "root", "key_hashes": [key_hash(key)], "admin": True}]
    tenants.write_text(yaml.safe_dump({"tenants": listed}))
    policy.write_text(POLICY)
    key_file.write_text(key)
    key_file.chmod(0o600)
    metrics = ["--metrics-port", "0"]
    cluster = Cluster(
        folder,
        worker_options=metrics,
        coordinator_options=[
            *metrics,
            "--tenants",
            str(tenants),
            "--request-log",
            str(folder / "requests.jsonl"),
            "--batch-folder",
            str(folder / "batches"),
        ],
        api_key=key,
        http=True,
    )
    async with running(cluster):
        async with cluster.client() as client:
            await asyncio.gather(*(client.generate([7] * 40, max_tokens=4) for _ in range(8)))
        options = ["--policy", str(policy), "--coordinator", cluster.target, "--api-key-file", str(key_file)]
        autoscaler = ServiceProcess("autoscaler", ["autoscaler", *options, *metrics], folder)
        cluster.members["autoscaler"] = autoscaler
        autoscaler.start()
        await asyncio.to_thread(autoscaler.wait_event, "scaling.decided")
        members = ("coordinator", "prefill-0", "decode-0", "autoscaler")
        deadline_s = time.monotonic() + SLACK_S
        while True:  # what was asked and decided is counted a moment after it is answered and logged
            series = [served(cluster.members[member]) for member in members]
            there = {name for each in series for name in each}
            missing = {name for title in SECTIONS for name in section(title)} - there - NOT_SERVED_HERE.keys()
            if not missing or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.1)
        await cluster.assert_no_leaks()
    return dict(zip(SECTIONS, (series[0], series[1] | series[2], series[3]), strict=True))


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_has_each_series_with_its_labels(found: dict[str, Series], title: str) -> None:
    page = section(title)
    assert found[title].keys() <= page.keys()
    for name, (kind, labels) in found[title].items():
        assert kind == page[name][0], name
        assert labels in (page[name][1], frozenset()), name


def test_every_series_of_the_page_is_served(found: dict[str, Series]) -> None:
    listed = {name for title in SECTIONS for name in section(title)}
    there = {name for series in found.values() for name in series}
    assert sorted(listed - there - NOT_SERVED_HERE.keys()) == []
    assert sorted(NOT_SERVED_HERE.keys() - (listed - there)) == []
