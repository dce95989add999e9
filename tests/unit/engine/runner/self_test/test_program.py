"""The self-test as `splitserve doctor --device` runs it, on the cpu."""

from __future__ import annotations

import json

import pytest

from engine.runner.self_test import __main__ as program


def test_a_cpu_checks_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--device", "cpu", "--transport", "nixl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(check["name"], check["passed"]) for check in found["checks"]] == [
        ("sampling", True),
        ("transfer", True),
    ]


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--device", "cuda:99"]) == 1
    assert capsys.readouterr().err.startswith("error: engine.device: cuda:99 is not available")
