"""One minute of faults on a cluster with real weights, whose streams have targets, so that workers of both pools
compute prompts, and whose measured times are noisy: no token is wrong, no block leaks, the streams end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]


def test_a_minute_of_faults(short_smollm2: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench.chaos",
        "--model",
        short_smollm2,
        "--minutes",
        "1",
        "--prompts",  # what transformers answers to each is computed first
        "8",
        "--step-noise",
        "1",
        "--ttft",
        "0.5",
        "--tpot",
        "1",
        "--json",
        "--log",
        str(tmp_path / "chaos.log"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    print(ended.stderr[-4000:], ended.stdout)
    assert ended.returncode == 0, (tmp_path / "chaos.log").read_text(errors="replace")[-8000:]
    report = json.loads(ended.stdout)
    assert report["faults"] >= 3
    assert report["streams"] >= 10
    assert report["wrong_tokens"] == 0
    assert report["leaked_blocks"] == 0
    assert report["own_ends"] == 0
    assert 0 < report["computed_by_decode"] < report["completed"]
    assert report["completed"] >= 0.95 * report["streams"], report["errors"]
