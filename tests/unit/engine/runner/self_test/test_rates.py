"""Rates of a device, measured on the cpu; and the self-test as `splitserve doctor --device` runs it there."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from engine.runner.self_test import __main__ as program
from engine.runner.self_test import rates
from engine.runner.self_test.rates import nominal_rates


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"READ_BYTES": 2**20, "MATRIX": 64, "HIDDEN": 64, "INTERMEDIATE": 96}.items():
        monkeypatch.setattr(rates, name, size)


def test_a_cpu_measures_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--device", "cpu", "--transport", "nixl", "--rates", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(check["name"], check["passed"]) for check in found["checks"]] == [
        ("sampling", True),
        ("transfer", True),
    ]
    measured = found["rates"]
    assert all(
        measured[name] > 0 for name in ("memory_gb_per_s", "bf16_tflops", "decode_share", "prompt_share")
    )
    assert measured["nominal_gb_per_s"] is measured["nominal_tflops"] is None


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--device", "cuda:99"]) == 1
    assert capsys.readouterr().err.startswith("error: engine.device: cuda:99 is not available")


def test_what_clocks_allow() -> None:
    """An H100 SXM: 3.35 TB/s and, at its highest clock, 1,070 TFLOP/s."""
    facts = {"major": 9, "minor": 0, "multi_processor_count": 132}
    clocks = {"clock_rate": 1_980_000, "memory_clock_rate": 2_619_000, "memory_bus_width": 5120}
    memory, products = nominal_rates(SimpleNamespace(**facts, **clocks))
    assert memory == pytest.approx(3352, abs=1)
    assert products == pytest.approx(1070, abs=1)
    assert nominal_rates(SimpleNamespace(**facts)) == (None, None), "an older torch does not tell"
    assert nominal_rates(SimpleNamespace(**(facts | clocks | {"minor": 7})))[1] is None
