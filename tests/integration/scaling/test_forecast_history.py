"""`splitserve autoscaler --history-file`: killed and started again it goes on with the demand that it had seen."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster
from tests.support.cluster.streams import eventually
from tests.support.waiting import PATIENCE_S

POLICY = """\
interval_s: 0.2
prefill: {kind: predictive, season_s: 60, interval_s: 1, target_ms: 500}
decode: {target_ms: 50}
"""


def decisions(autoscaler: ServiceProcess) -> list[dict[str, Any]]:
    """The latest first."""
    port = autoscaler.wait_event("metrics.ready")["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/decisions", timeout=PATIENCE_S) as page:
        found: list[dict[str, Any]] = json.loads(page.read())["decisions"]
    return found


def arrived(decision: dict[str, Any]) -> float:
    return decision["pools"]["prefill"]["inputs"]["uncached_tokens_per_s"] or 0.0


def tokens_in(path: Path) -> float:
    return sum(row[4] for row in json.loads(path.read_text())["arrivals"]) if path.exists() else 0.0


def rate_in(path: Path) -> float:
    """Mean tokens a second of the time that is in the file."""
    rows = json.loads(path.read_text())["arrivals"]
    return float(sum(row[4] for row in rows) / sum(end_s - start_s for start_s, end_s, *_ in rows))


def season_in(path: Path) -> list[float]:
    """The mean rates of the intervals that have ended."""
    rates: list[float] = json.loads(path.read_text())["seasons"].get("prefill", {}).get("rates", [])
    return rates


@pytest.mark.slow
async def test_killed_and_started_again_it_forecasts_the_same(
    simulated_cluster: Cluster, tmp_path: Path
) -> None:
    policy, history = tmp_path / "policy.yaml", tmp_path / "history.json"
    policy.write_text(POLICY)
    options = ["--policy", str(policy), "--coordinator", simulated_cluster.target, "--metrics-port", "0"]
    autoscaler = ServiceProcess(
        "autoscaler", ["autoscaler", *options, "--history-file", str(history)], tmp_path
    )
    autoscaler.start()
    try:
        autoscaler.wait_event("scaling.decided")
        async with simulated_cluster.client() as client:
            await asyncio.gather(*(client.generate([7 + n] * 400, max_tokens=2) for n in range(20)))
        await eventually(lambda: tokens_in(history) >= 7_000, "the arrivals in the file")
        await eventually(lambda: season_in(history), "a season's first interval in the file")
        assert arrived(decisions(autoscaler)[0]) > 0
        autoscaler.kill()
        before = rate_in(history)
        autoscaler.start()
        restored = autoscaler.wait_event("history.restored")
        assert restored["buckets"] > 0
        assert restored["season_intervals"]["prefill"] > 0
        await eventually(lambda: bool(decisions(autoscaler)), "a decision")
        first = decisions(autoscaler)[-1]
        assert first["number"] == 1
        # Nothing has arrived since; the mean is over the seconds that are recorded and not too old.
        assert before > 0
        assert arrived(first) == pytest.approx(before, rel=0.5)
        assert "no measured rate of arrivals" not in first["pools"]["prefill"]["reason"]

        autoscaler.kill()
        history.write_text("{")
        autoscaler.start()
        assert autoscaler.wait_event("history.ignored")["error"].startswith("file: Invalid JSON")
        await eventually(lambda: bool(decisions(autoscaler)), "a decision")
        assert arrived(decisions(autoscaler)[-1]) == 0.0
    finally:
        assert autoscaler.terminate() == 0
    assert json.loads(history.read_text())["version"] == 1, "it is written once more at the end"
