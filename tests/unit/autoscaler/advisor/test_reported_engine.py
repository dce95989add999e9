"""The engine model from a recording: what is fitted, what takes its place, what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from autoscaler.advisor.recorded_traffic import load_traffic
from autoscaler.advisor.reported_engine import reported_engine
from autoscaler.simulation.outcome import Slo
from autoscaler.sizing.engine_model_file import load_engine_model
from splitserve.errors import FailedPreconditionError, InvalidArgumentError

STEP_S, TOKEN_S, SQUARE_S = 4e-3, 50e-6, 2e-9
PREFILL = {
    "pool": "prefill", "kv_capacity_tokens": 5000, "kv_bytes_per_token": 100, "max_running_requests": 32,
    "max_step_tokens": 512, "lane_gb_per_second": 2.0, "prefill_tokens_per_second": 8000.0, "decode_step_ms": 0.0,
    "step_fit": None,
}  # fmt: skip
DECODE = PREFILL | {
    "pool": "decode", "lane_gb_per_second": None, "prefill_tokens_per_second": 0.0, "decode_step_ms": 9.0,
    "step_fit": {"base_ms": 7.0, "sequence_ms": 0.5, "context_token_ms": 0.001},
}  # fmt: skip


def line(number: int, prompt: int, cached: int = 0, **changes: Any) -> dict[str, Any]:
    chunks = -(-(prompt - cached) // 512)
    compute_s = chunks * STEP_S + TOKEN_S * (prompt - cached) + SQUARE_S * (prompt**2 - cached**2)
    return {
        "timestamp": 1000.0 * number, "input_length": prompt, "output_length": 9, "hash_ids": [number],
        "outcome": "completed", "ttft_ms": compute_s * 1e3 + 12, "tpot_ms": 8.0, "wait_ms": 5.0,
        "prefill_queue_ms": 0.0, "prefill_compute_ms": compute_s * 1e3, "prefill_chunks": chunks,
        "cached_tokens": cached, "handoff_ms": 3.0, **changes,
    }  # fmt: skip


def recording(path: Path, *lines: dict[str, Any]) -> Path:
    head = {"recording": 1, "seconds": 60, "block_tokens": 512}
    path.write_text("".join(json.dumps(one) + "\n" for one in (head, *lines)))
    return path


def test_costs_are_those_that_the_requests_took(tmp_path: Path) -> None:
    lengths = [
        (100, 0),
        (400, 0),
        (700, 512),
        (1000, 0),
        (1500, 0),
        (2000, 1024),
        (3000, 0),
        (512, 0),
        (60, 0),
    ]
    prompts = [line(number, *sizes) for number, sizes in enumerate(lengths)]
    # One that shared its steps, one that waited: neither says what a prompt costs.
    shared = line(90, 300, prefill_compute_ms=500.0, ttft_ms=512.0)
    waited = line(91, 300, prefill_queue_ms=400.0, prefill_compute_ms=90.0, ttft_ms=502.0)
    path = recording(tmp_path / "r.jsonl", *prompts, shared, waited, {"workers": [PREFILL, DECODE]})
    found = reported_engine(load_traffic(path))
    model = found.model
    assert model.prefill_step_s == pytest.approx(STEP_S, rel=0.01)
    assert model.prefill_token_s == pytest.approx(TOKEN_S, rel=0.01)
    assert model.prefill_token2_s == pytest.approx(SQUARE_S, rel=0.05)
    assert (model.step_s, model.sequence_s) == pytest.approx((7e-3, 0.5e-3))
    assert model.context_token_s == pytest.approx(1e-6)
    assert (model.max_step_tokens, model.max_running_requests, model.kv_capacity_tokens) == (512, 32, 5000)
    assert (model.link_gb_per_s, model.handoff_s) == pytest.approx((2.0, 3e-3))
    assert model.request_s == pytest.approx(7e-3)
    assert found.notes == []


def test_without_idle_prompts_the_workers_rate_takes_their_place(tmp_path: Path) -> None:
    flat = DECODE | {"step_fit": None}
    path = recording(tmp_path / "r.jsonl", line(0, 100), {"workers": [PREFILL, flat]})
    found = reported_engine(load_traffic(path))
    assert found.model.prompt_s(800) == pytest.approx(0.1)
    assert (found.model.step_s, found.model.sequence_s) == (9e-3, 0.0)
    assert len(found.notes) == 2


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    bare = load_traffic(recording(tmp_path / "a.jsonl", line(0, 100)))
    idle = load_traffic(
        recording(
            tmp_path / "b.jsonl", line(0, 100), {"workers": [PREFILL | {"prefill_tokens_per_second": 0.0}, DECODE]}
        )
    )  # fmt: skip
    for traffic, words in ((bare, "--engine-model"), (idle, "how fast it computes prompts")):
        with pytest.raises(FailedPreconditionError, match=words):
            reported_engine(traffic)


def test_attainment_of_what_was_measured(tmp_path: Path) -> None:
    slow, failed = line(1, 100, ttft_ms=3000.0), line(2, 100, outcome="failed", ttft_ms=None)
    jerky, good = line(3, 100, tpot_ms=120.0), line(4, 100)
    traffic = load_traffic(recording(tmp_path / "r.jsonl", slow, failed, jerky, good))
    assert traffic.attainment(Slo(2.0, 0.1)) == 0.25
    assert traffic.unfinished == 1


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    broken = line(0, 100)
    del broken["prefill_chunks"]
    with pytest.raises(InvalidArgumentError, match="line 2"):
        load_traffic(recording(tmp_path / "r.jsonl", broken))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("[]", "not an object"),
        ('{"speed": 1}', "unknown: speed"),
        ('{"step_s": -1}', "step_s must be a number of at least 0"),
        ('{"max_step_tokens": 0}', "max_step_tokens"),
        ('{"step_s": true}', "step_s"),
    ],
)
def test_engine_model_files_are_checked(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "engine.json"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=words):
        load_engine_model(path)
    with pytest.raises(InvalidArgumentError, match="engine_model: cannot read"):
        load_engine_model(tmp_path / "none.json")


def test_an_engine_model_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text('{"step_s": 0.01, "max_step_tokens": 256}')
    model = load_engine_model(path)
    assert (model.step_s, model.max_step_tokens) == (0.01, 256)
    path.write_text(json.dumps(asdict(model)))
    assert load_engine_model(path) == model
    path.write_text('{"separate_steps": 1}')
    with pytest.raises(InvalidArgumentError, match="separate_steps must be true or false"):
        load_engine_model(path)
