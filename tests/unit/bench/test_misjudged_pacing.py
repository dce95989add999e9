"""Rows of turns on engines that misjudge their speed."""

from __future__ import annotations

import pytest

from bench.engine.pacing import Row, main, misjudged_rows, misjudging_meter


def test_rows_alternate_and_add_up_answers() -> None:
    order: list[tuple[str, int]] = []

    def run(engine: str, turn: int) -> Row:
        order.append((engine, turn))
        kept = 0.5 if engine == "slow" and turn == 0 else 1.0
        return Row(kept, 10.0, 20.0, 30.0 + turn, 40.0, 50.0, prompts=2, answers=10 if turn == 0 else 30)

    rows = misjudged_rows(2, {0.67: "fast", 1.5: "slow"}, run)
    assert order == [("fast", 0), ("slow", 0), ("slow", 1), ("fast", 1)]
    assert [(row["factor"], row["tpot_attained"], row["answers"]) for row in rows] == [
        (0.67, 1.0, 40),
        (1.5, 0.875, 40),  # of 5 and 30 of 40, not the mean of both turns
    ]
    assert rows[0]["gap_max_ms"] == 30.5


@pytest.mark.parametrize("factors", ["0", "-1", "nan", "inf", "1 1.0"])
def test_factors_that_are_none_are_refused(factors: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--misjudged", *factors.split()])
    assert refused.value.code == 2
    assert "--misjudged: " in capsys.readouterr().err


@pytest.mark.parametrize("factor", [1 / 1.5, 1.0, 1.5])
def test_a_misjudging_meter_is_wrong_by_its_factor(factor: float) -> None:
    meter = misjudging_meter(factor)
    for sequences in (1, 2, 4, 8) * 16:
        meter.fit.record(sequences, 100 * sequences, 0.010 + 0.001 * sequences)
    for tokens in (64, 128, 256, 512) * 16:
        meter.prompt_fit.record(tokens, 0.0, 0.005 + 0.0004 * tokens)
    assert meter.fit.latest is not None
    assert meter.prompt_fit.latest is not None
    assert meter.fit.latest.step_s(4, 400) == pytest.approx(0.014 * factor, rel=0.05)
    assert meter.prompt_fit.latest.chunk_s(256, 0) == pytest.approx(0.1074 * factor, rel=0.05)
    for tokens in (64, 128, 256, 512) * 16:
        decode_s = meter.fit.latest.step_s(4, 400)
        meter.prompt_fit.record_mixed(tokens, 0.0, decode_s, 0.014 + 0.003 + 0.0004 * tokens)
    assert meter.prompt_fit.beside is not None
    assert meter.prompt_fit.beside.chunk_s(256, 0) == pytest.approx((0.003 + 0.1024) * factor, rel=0.1)
