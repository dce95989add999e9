"""The canary with real weights: a worker whose KV is wrong is found and named."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import eventually
from tests.support.waiting import PATIENCE_S

CANARY = ("--canary-interval", "2", "--metrics-port", "0")
SMALL = ("--num-blocks", "128", "--max-step-tokens", "64")
UNCHECKED = (*SMALL, "--verify-kv", "off")
"""Checksums would have the first golden prompt refused, and count as no answer."""
WRONG_BYTES = {"wrong_bytes": {"every": 1}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def events(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    return [event for event in cluster.members["coordinator"].events() if event["event"] == name]


def samples(cluster: Cluster, name: str) -> dict[tuple[str, ...], float]:
    """Values of a series by its labels' values, in order of the labels' names, the model's left out."""
    port = cluster.members["coordinator"].wait_event("metrics.ready")["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return {
        tuple(value for label, value in sorted(sample.labels.items()) if label != "model"): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def answers(cluster: Cluster, outcome: str) -> float:
    return samples(cluster, "splitserve_canary_answers_total").get((outcome,), 0.0)


async def test_wrong_bytes_are_found_and_their_worker_is_named(smollm2: str, log_dir: Path) -> None:
    cluster = Cluster(
        log_dir, model=smollm2, engine="torch", decode=2, worker_options=UNCHECKED, coordinator_options=CANARY
    )
    async with running(cluster):
        await eventually(
            lambda: answers(cluster, "right") >= 4, "both golden prompts are answered by both pairs"
        )
        assert not events(cluster, "canary.wrong_answer"), "no false alarm"
        cluster.add_worker("prefill", "prefill-1", faults=WRONG_BYTES)
        await eventually(
            lambda: (
                {event["decode_worker"] for event in events(cluster, "canary.wrong_answer")}
                == {"decode-0", "decode-1"}
            ),
            "the wrong answers of both pairs",
        )
        assert {event["prefill_worker"] for event in events(cluster, "canary.wrong_answer")} == {"prefill-1"}
        assert answers(cluster, "wrong") >= 2
        await eventually(
            lambda: samples(cluster, "splitserve_canary_wrong_pairs").get(()) == 2, "two pairs are wrong"
        )
        await cluster.assert_no_leaks()
