"""Numbers of the benches' options: out of bounds is refused before anything starts, with the bound."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest

from bench.chaos import run
from bench.option_values import MOST, positive_number, positive_whole, whole_number


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", str(MOST)])
def test_positive_numbers_are_bounded(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"above 0 and below 1000000000"):
        positive_number(text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(positive_whole, "0"), (whole_number, "-1"), (positive_whole, str(MOST + 1)), (whole_number, "9" * 40)],
)
def test_whole_numbers_are_bounded(kind: Callable[[str], int], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"must be [01]\.\.1000000000, not "):
        kind(text)


def test_numbers_within_the_bounds_are_taken() -> None:
    assert (positive_number("0.5"), positive_whole("1"), whole_number("0")) == (0.5, 1, 0)


@pytest.mark.parametrize("option", ["--minutes", "--load", "--every", "--prompts", "--ttft", "--tpot"])
def test_chaos_refuses_what_no_cluster_could_serve(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["chaos", option, "0"])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    assert f"argument {option}: must be " in capsys.readouterr().err
