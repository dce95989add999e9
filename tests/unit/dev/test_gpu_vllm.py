"""The script for engine vllm on one GPU: what it runs exists, and what it reads is what the parts print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.vllm.main import parse
from dev.gpu_vllm import TESTS, main, parts, read_bench, read_runner

ROOT = Path(__file__).resolve().parents[3]


def test_its_parts_fit_in_ten_minutes_and_name_what_exists() -> None:
    assert sum(part.limit_s for part in parts()) < 700, "the last ones get what is left of 570 s"
    files = [word for part in parts() for word in part.command if word.startswith(TESTS)]
    assert files
    assert all((ROOT / file).is_file() for file in files)
    bench = next(part for part in parts() if part.name == "bench.vllm")
    options = parse(list(bench.command[3:]))
    assert (options.gpu, options.streams, options.lengths) == (True, [64, 256], [2048, 7500])


def test_what_the_parts_print_is_read() -> None:
    settings = {"vllm": "0.32.0", "second_runner": True, "async_scheduling": False}
    assert read_runner(f"INFO: a log line\n{json.dumps(settings)}")[:2] == (
        "passed",
        "vLLM 0.32.0: second model runner, synchronous scheduling",
    )
    content = {
        "rows": [{"streams": 64, "ratio_tpot": 1.04}],
        "handoff": [{"prompt_tokens": 2048, "ratio_second_token": 0.93}],
    }
    assert read_bench(json.dumps(content))[1] == (
        "64 streams: TPOT 1.04 of vLLM's; handoff of 2048 tokens: 0.93 of vLLM's"
    )


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dev.gpu_check.find_device", lambda: {"why": "none here"})
    assert main(["--out", str(tmp_path)]) == 2
