"""The self-test of a device, on the cpu."""

from __future__ import annotations

import json

import pytest

from dev import gpu_self_test
from dev.gpu_self_checks import WrongResultError
from dev.gpu_self_test import CheckResult, run_checks


def good() -> None:
    return


def bad() -> None:
    raise WrongResultError("off by 3")


def test_a_cpu_checks_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_self_test.main(["--device", "cpu", "--transport", "nixl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(check["name"], check["passed"]) for check in found["checks"]] == [
        ("sampling", True),
        ("transfer", True),
    ]


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_self_test.main(["--device", "cuda:99"]) == 1
    assert capsys.readouterr().err.startswith("error: engine.device: cuda:99 is not available")


def test_checks_run_in_order_and_go_on_after_a_failure() -> None:
    now = iter(range(100))
    found = run_checks([("attention", good), ("graphs", bad), ("sampling", good)], lambda: next(now))
    assert found == [
        CheckResult("attention", True, 1),
        CheckResult("graphs", False, 1, "off by 3"),
        CheckResult("sampling", True, 1),
    ]


def test_graphs_of_a_broken_attention_are_not_tried() -> None:
    found = run_checks([("attention", bad), ("graphs", bad), ("sampling", good)])
    assert [result.name for result in found] == ["attention", "sampling"]
