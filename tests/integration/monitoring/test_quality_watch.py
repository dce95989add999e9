"""The quality watch with real weights: a worker whose KV is wrong is found within two rounds, named and isolated."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.clients.patient import PatientClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import eventually
from tests.support.waiting import PATIENCE_S

WATCH = ("--quality", "isolate", "--quality-interval", "2", "--metrics-port", "0")
SMALL = ("--num-blocks", "128", "--max-step-tokens", "64")
UNCHECKED = (*SMALL, "--verify-kv", "off")
"""Checksums would have the first golden prompt refused, and count as no answer."""
WRONG_BYTES = "faults: {wrong_bytes: {every: 1}}\n"
MISSCALED = "tests.support.transfer.misscaled_worker"
QUESTION = "Question: What is the capital of France?\nAnswer: The capital of France is"

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


async def rounds(cluster: Cluster, more: int) -> None:
    """Waits until so many more rounds are over."""
    before = sum(samples(cluster, "splitserve_quality_rounds_total").values())
    await eventually(
        lambda: sum(samples(cluster, "splitserve_quality_rounds_total").values()) >= before + more,
        "rounds of golden prompts",
    )


async def answers_are_right(cluster: Cluster, prefill: str) -> None:
    async with PatientClient(cluster.target, timeout_s=PATIENCE_S) as client:
        for turn in range(4):
            question = f"{turn}. {QUESTION}"
            answer = await client.generate(question, temperature=0.0, max_tokens=4)
            assert "Paris" in answer.text
            assert answer.served_by.prefill_worker == prefill


async def test_wrong_bytes_are_found_and_their_worker_is_isolated(smollm2: str, log_dir: Path) -> None:
    faults = log_dir / "faults.yaml"
    faults.write_text(WRONG_BYTES)
    cluster = Cluster(
        log_dir, model=smollm2, engine="torch", decode=2, worker_options=UNCHECKED, coordinator_options=WATCH
    )
    async with running(cluster):
        await rounds(cluster, 1)
        assert not events(cluster, "quality.wrong_answer"), "no false alarm"
        cluster.add_worker("prefill", "prefill-1", "--config", str(faults))

        def isolated() -> bool:
            return any(
                e["worker_id"] == "prefill-1" and e["whole"] for e in events(cluster, "quality.isolated")
            )

        await eventually(isolated, "prefill-1 is isolated")
        wrong = events(cluster, "quality.wrong_answer")
        assert {event["prefill_worker"] for event in wrong} == {"prefill-1"}
        for decode in ("decode-0", "decode-1"):
            assert len([event for event in wrong if event["decode_worker"] == decode]) >= 2
        at_fault = events(cluster, "quality.at_fault")[-1]
        assert (at_fault["prefill_workers"], at_fault["decode_workers"]) == (["prefill-1"], [])
        await answers_are_right(cluster, "prefill-0")
        for name in ("splitserve_quality_isolated", "splitserve_quality_at_fault"):
            await eventually(lambda name=name: samples(cluster, name).get(("prefill",)) == 1, name)  # type: ignore[misc]
        assert set(samples(cluster, "splitserve_quality_wrong_kl_nats")) >= {("decode-0", "prefill-1")}
        await cluster.assert_no_leaks()


async def test_wrong_scales_of_narrow_kv_are_found_and_right_ones_are_not(
    smollm2: str, log_dir: Path
) -> None:
    options = (*SMALL, "--wire-dtype", "fp8_e4m3", "--verify-kv", "all")
    cluster = Cluster(
        log_dir, model=smollm2, engine="torch", worker_options=options, coordinator_options=WATCH
    )
    async with running(cluster):
        await rounds(cluster, 4)  # each golden prompt once
        assert not events(cluster, "quality.wrong_answer"), "no false alarm"
        cluster.add_worker("prefill", "prefill-1", module=MISSCALED)
        await eventually(lambda: events(cluster, "quality.isolated"), "the pair is isolated")
        found = events(cluster, "quality.isolated")[0]
        assert (found["worker_id"], found["not_with"], found["whole"]) == ("prefill-1", ["decode-0"], False)
        wrong = events(cluster, "quality.wrong_answer")
        assert {event["prefill_worker"] for event in wrong} == {"prefill-1"}
        await answers_are_right(cluster, "prefill-0")
        await cluster.assert_no_leaks()


async def test_the_only_pair_is_an_alarm_and_stays_in_rotation(smollm2: str, log_dir: Path) -> None:
    faults = log_dir / "faults.yaml"
    faults.write_text(WRONG_BYTES)
    cluster = Cluster(
        log_dir,
        model=smollm2,
        engine="torch",
        worker_options=(*UNCHECKED, "--config", str(faults)),
        coordinator_options=WATCH,
    )
    async with running(cluster):
        await eventually(lambda: len(events(cluster, "quality.wrong_answer")) >= 2, "wrong answers")
        await eventually(
            lambda: samples(cluster, "splitserve_quality_at_fault").get(("pair",)) == 1,
            "the pair is at fault",
        )
        async with PatientClient(cluster.target, timeout_s=PATIENCE_S) as client:
            answer = await client.generate(QUESTION, temperature=0.0, max_tokens=4)
        assert answer.token_ids, "the pair still serves, wrong as its answers may be"
        assert not events(cluster, "quality.isolated")
        await cluster.assert_no_leaks()
