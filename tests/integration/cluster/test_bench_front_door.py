"""The benchmark of the front door runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.waiting import PATIENCE_S


@pytest.mark.slow
def test_one_json_object_with_a_figure_a_part() -> None:
    command = [sys.executable, "-m", "bench.front_door", "--json", "--entrypoints", "grpc"]
    ended = subprocess.run(
        [*command, "--parts", "tokens,workers", "--seconds", "0.3"],
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    )
    report = json.loads(ended.stdout)
    assert {"date", "command", "machine"} <= set(report)
    assert report["cpu_us_per_token_grpc"] > 0
    assert report["cpu_us_per_token_grpc_saturated"] > 0
    assert report["cpu_us_per_token_worker"] > 0
    assert report["wait_ms_grpc_p99"] >= report["wait_ms_grpc_p50"] > 0
    assert report["tokens_per_message_grpc"] >= 1
