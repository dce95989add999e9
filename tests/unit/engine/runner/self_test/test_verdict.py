"""What is switched off for which failure, and what ends the worker instead."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bench.faults.plan import FaultPlan, Trigger
from bench.faults.transport import FaultyTransport
from engine.core.model_runner import ModelFacts
from engine.model.attention_interface import AttentionContext
from engine.model.loaded_model import LoadedModel
from engine.model.probe import AttentionKind, AttentionShape
from engine.runner.self_test import device_checks
from engine.runner.self_test.checks import WrongResultError
from engine.runner.self_test.device_checks import (
    MAX_WHY,
    Check,
    CheckName,
    CheckResult,
    one_line,
    report,
    require_transfer,
    run_checks,
    self_tested,
    switched_off,
)
from kv_transfer.transports.transport import Transport
from splitserve.config.engine import EngineConfig
from splitserve.errors import UnavailableError
from tests.support.transfer.memory_transport import MemoryHub, MemoryTransport

CPU = torch.device("cpu")
MODEL = LoadedModel(
    module=None,
    config=None,
    context=AttentionContext(),
    facts=ModelFacts(512, 400, frozenset()),
    attention=AttentionShape(2, 2, 16, frozenset({AttentionKind(4), AttentionKind(4, 9, 5.0)})),
    dtype="float32",
    device=CPU,
    fingerprint="",
)


def good() -> None:
    return


def bad() -> None:
    raise WrongResultError("off by 3")


def result(name: CheckName, *, passed: bool = False) -> CheckResult:
    return CheckResult(name, passed, 0.1, "" if passed else "off by 3")


@pytest.mark.parametrize(
    ("failed", "attention", "graphs", "sampling"),
    [
        ([], "auto", "auto", "auto"),
        (["attention"], "torch", "off", "auto"),
        (["graphs"], "auto", "off", "auto"),
        (["sampling"], "auto", "auto", "off"),
        (["attention", "sampling"], "torch", "off", "off"),
    ],
)
def test_what_failed_is_switched_off(
    failed: list[CheckName], attention: str, graphs: str, sampling: str
) -> None:
    names: Sequence[CheckName] = ("attention", "graphs", "sampling")
    config = switched_off(EngineConfig(), [result(name, passed=name not in failed) for name in names])
    assert (config.attention_backend, config.cuda_graphs, config.device_sampling) == (
        attention,
        graphs,
        sampling,
    )


def test_also_what_the_settings_ask_for_by_name() -> None:
    asked = EngineConfig(attention_backend="triton")
    assert switched_off(asked, [result("attention")]).attention_backend == "torch"


def test_checks_run_in_order_and_go_on_after_a_failure() -> None:
    now = iter(range(100))
    found = run_checks([("attention", good), ("graphs", bad), ("sampling", good)], good, lambda: next(now))
    assert found == [
        CheckResult("attention", True, 1),
        CheckResult("graphs", False, 1, "off by 3"),
        CheckResult("sampling", True, 1),
    ]


def test_graphs_of_a_broken_attention_are_not_tried() -> None:
    found = run_checks([("attention", bad), ("graphs", bad), ("sampling", good)], good)
    assert [each.name for each in found] == ["attention", "sampling"]


def test_a_device_that_stops_working_ends_the_worker_with_one_sentence() -> None:
    with pytest.raises(UnavailableError) as broken:
        run_checks([("attention", bad)], bad)
    assert broken.value.reason == "DEVICE_BROKEN"
    assert broken.value.message == (
        "the device stopped working in its self-test of attention (off by 3); "
        "to start without it: --attention-backend torch --cuda-graphs off"
    )


def test_reasons_are_one_short_line() -> None:
    assert (
        one_line(RuntimeError("\n  CUDA error: out of memory\nCompile with")) == "CUDA error: out of memory"
    )
    assert one_line(RuntimeError()) == "RuntimeError"
    assert len(one_line(RuntimeError("x" * 5000))) == MAX_WHY


def test_a_failure_is_a_warning_that_names_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="splitserve"):
        report([result("attention"), result("sampling", passed=True)], CPU)
    events: list[tuple[str, str, dict[str, Any]]] = [
        (record.levelname, record.message, vars(record)["event_fields"]) for record in caplog.records
    ]
    (level, name, fields), (warning, failed, why) = events
    assert (level, name) == ("INFO", "engine.self_test")
    assert (fields["passed"], fields["failed"]) == (["sampling"], ["attention"])
    assert (warning, failed) == ("WARNING", "engine.self_test_failed")
    assert why == {
        "check": "attention",
        "why": "off by 3",
        "instead": "torch computes attention, without CUDA graphs",
    }


def test_a_model_s_own_shapes_are_checked() -> None:
    """On cpu torch computes attention, which is the reference; sampling remains. The rest is a stand-in."""
    asked: list[CheckName] = []

    def run(checks: Sequence[tuple[CheckName, Check]], _: Check) -> list[CheckResult]:
        asked.extend(name for name, _ in checks)
        return run_checks([("attention", bad), *checks], good)

    config = self_tested(EngineConfig(), MODEL, run)
    assert asked == ["sampling"]
    assert (config.attention_backend, config.device_sampling) == ("torch", "auto")
    assert not device_checks.engine_checks(
        EngineConfig(device_sampling="off"), device_checks.GENERAL_SHAPE, [], 400, CPU
    )


def test_a_transport_that_cannot_reach_the_memory_ends_the_worker() -> None:
    hub = MemoryHub()

    def working(_: str) -> Transport:
        return MemoryTransport(hub)

    def wrong(_: str) -> Transport:
        return FaultyTransport(MemoryTransport(hub), FaultPlan(wrong_bytes=Trigger(every=1)))

    def missing(kind: str) -> Transport:
        raise UnavailableError(f"transport {kind}: not installed\nsecond line")

    require_transfer("nixl", CPU, working)
    for make, why in (
        (wrong, "other bytes arrived than were sent"),
        (missing, "transport nixl: not installed"),
    ):
        with pytest.raises(UnavailableError) as failure:
            require_transfer("nixl", CPU, make)
        assert failure.value.reason == "TRANSFER_SELF_TEST"
        assert failure.value.message == (
            f"transport nixl: a write of this process to itself in the memory of cpu failed: {why}"
        )
