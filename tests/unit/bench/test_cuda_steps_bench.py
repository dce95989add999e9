"""The bench of steps on a CUDA device: its cases, its turns and its rows, and what it says without a device."""

from __future__ import annotations

import argparse

import pytest
import torch

from bench.engine.cuda_steps import cases
from bench.engine.cuda_steps.__main__ import CASES, main, settings_of
from bench.engine.cuda_steps.cases import BLOCK, parse_case, prompts_of, row_of, step_times, turns_of


def test_decode_steps_are_one_token_each_after_the_context() -> None:
    case = parse_case("decode:3x40")
    steps = case.sequences()
    assert [(len(step.token_ids), step.num_computed, step.num_new) for step in steps] == [(40, 39, 1)] * 3
    blocks = [block for step in steps for block in step.block_ids]
    assert sorted(blocks) == list(range(case.num_blocks)), "each block once"
    assert all(len(step.block_ids) * BLOCK >= 40 for step in steps)
    assert len({step.table_id for step in steps + case.sequences()}) == 6


def test_what_decode_steps_read_is_written_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CHUNK_TOKENS", 16)
    steps = parse_case("decode:2x40").sequences()
    chunks = [
        (step.request_id[-1], step.num_computed, step.num_new, step.sample) for step in prompts_of(steps)
    ]
    assert chunks == [
        (name, start, new, False) for name in "01" for start, new in ((0, 16), (16, 16), (32, 7))
    ]
    assert not list(prompts_of(parse_case("prefill:40").sequences()))


def test_a_prompt_is_one_chunk() -> None:
    (step,) = parse_case("prefill:512").sequences()
    assert (step.prompt_tokens, step.num_computed, step.num_new, len(step.block_ids)) == (512, 0, 512, 32)


def test_a_prompt_beside_decodes() -> None:
    steps = parse_case("mixed:2x40+33").sequences()
    assert [(len(step.token_ids), step.num_computed, step.num_new) for step in steps] == [
        (40, 39, 1),
        (40, 39, 1),
        (33, 0, 33),
    ]
    blocks = [block for step in steps for block in step.block_ids]
    assert sorted(blocks) == list(range(9))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "decode:8",
        "decode:0x8",
        "prefill:1x8",
        "prefill:",
        "x:1",
        "prefill:1000000",
        "mixed:2x8",
        "mixed:2x8+0",
    ],
)
def test_other_cases_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither"):
        parse_case(text)


def test_turns_alternate() -> None:
    assert list(turns_of(3)) == [(True, False), (False, True), (True, False)]


def test_ratios_are_of_the_same_turn() -> None:
    row = row_of("decode:1x8", [[1.0, 1.0], [4.0]], [[2.0, 2.0], [8.0]])
    assert (row.with_ms, row.without_ms, row.ratio, row.steps) == (1000.0, 2000.0, 2.0, 3)


def test_steps_are_timed_for_so_long() -> None:
    now = [0.0]

    def step() -> None:
        now[0] += 0.4

    assert step_times(step, 1.0, lambda: now[0]) == pytest.approx([0.4] * 3)
    assert len(step_times(step, 0.1, lambda: now[0])) == 2


def test_settings_hold_the_largest_case() -> None:
    config = settings_of([parse_case(name) for name in CASES["fused"]], "cuda:0")
    assert config.num_blocks == 32 * 1024 // BLOCK
    assert config.max_running_requests == 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 2
    found = capsys.readouterr()
    assert not found.out
    assert "cuda:0 is not available" in found.err


def test_the_cpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"]) == 2
    assert "cpu is none" in capsys.readouterr().err
