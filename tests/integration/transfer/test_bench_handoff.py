"""The handoff benchmark runs from end to end and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.waiting import PATIENCE_S

KEYS = {
    *("prompt_tokens", "bytes", "exposed_ms_p50", "exposed_ms_p95", "gb_per_s", "raw_gb_per_s"),
    *("bandwidth_share_of_raw", "descriptors", "contiguous_runs", "ttft_split_ms_p50"),
    *("ttft_colocated_ms_p50", "ttft_split_minus_colocated_ms", "second_token_gap_ms_p50"),
    "normal_step_ms_p50",
}


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_one_json_object_with_a_row_a_length() -> None:
    command = [sys.executable, "-m", "bench.handoff", "--json", "--model", "simulated"]
    ended = subprocess.run(
        [*command, "--lengths", "64,2000", "--repeats", "1"],
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
    )
    report = json.loads(ended.stdout)
    assert {"date", "command", "machine", "model"} <= set(report)
    assert report["machine"]["versions"]["splitserve"]
    short, long = report["rows"]
    assert (short["prompt_tokens"], long["prompt_tokens"]) == (64, 2000)
    assert set(short) >= KEYS
    assert (short["descriptors"], short["contiguous_runs"]) == (1, 1)
    assert long["bytes"] > short["bytes"] > 0
    assert long["descriptors"] >= long["contiguous_runs"] >= 1
    assert all(row["exposed_ms_p50"] > 0 and row["raw_gb_per_s"] > 0 for row in report["rows"])
