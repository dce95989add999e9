"""The device and the type that an engine computes in."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.runner import device as runner_device
from engine.runner.device import (
    CudaFacts,
    choose_device,
    choose_dtype,
    cuda_problem,
    log_dtype,
    multiplies_bfloat16,
    read_cuda_facts,
)
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.runtime.process import DEVICE_ORDER_VARIABLE, number_devices_like_nvidia_smi

GOOD = CudaFacts("2.13.0+cu130", (13, 0), (13, 2), 2)
BUILT_FOR_CPU = CudaFacts("2.13.0+cpu", None, None, 0)
OLD_DRIVER = replace(GOOD, driver=(12, 4), devices=0)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        (GOOD, None),
        (replace(GOOD, driver=(13, 0), built_for=(13, 1)), None),
        (BUILT_FOR_CPU, "torch 2.13.0+cpu was built without CUDA"),
        (replace(GOOD, driver=None, devices=0), "there is no NVIDIA driver"),
        (OLD_DRIVER, "needs CUDA 13.0, the NVIDIA driver supports 12.4; update the driver"),
        (replace(GOOD, devices=0), "the NVIDIA driver shows no device"),
    ],
)
def test_why_cuda_cannot_be_used(facts: CudaFacts, problem: str | None) -> None:
    found = cuda_problem(facts)
    assert (found is None) == (problem is None)
    assert problem is None or problem in str(found)


def test_a_device_that_was_asked_for() -> None:
    assert str(choose_device("cuda", GOOD)) == "cuda:0"
    assert str(choose_device("cuda:1", GOOD)) == "cuda:1"
    assert str(choose_device("cpu", GOOD)) == "cpu"
    for name, facts, why in (
        ("cuda:2", GOOD, "engine.device: cuda:2 is not available (2 cuda devices)"),
        (
            "cuda",
            BUILT_FOR_CPU,
            "engine.device: cuda is not available: torch 2.13.0+cpu was built without CUDA",
        ),
        ("cuda:0", OLD_DRIVER, "engine.device: cuda:0 is not available: torch 2.13.0+cu130 needs CUDA 13.0"),
    ):
        with pytest.raises(ConfigError) as refused:
            choose_device(name, facts)
        assert refused.value.message.startswith(why)
        assert refused.value.field == "engine.device"


def test_auto_takes_the_cpu_and_says_so_where_the_driver_is_too_old(caplog: pytest.LogCaptureFixture) -> None:
    assert str(choose_device("auto", GOOD)) == "cuda:0"
    with caplog.at_level(logging.WARNING, logger="splitserve"):
        assert str(choose_device("auto", BUILT_FOR_CPU)) == "cpu"
        assert not caplog.records
        assert str(choose_device("auto", OLD_DRIVER)) == "cpu"
    assert [record.message for record in caplog.records] == ["engine.device_unusable"]


def test_devices_are_numbered_as_nvidia_smi_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_ORDER_VARIABLE, "FASTEST_FIRST")
    number_devices_like_nvidia_smi()
    assert os.environ[DEVICE_ORDER_VARIABLE] == "FASTEST_FIRST", "the user's own"
    monkeypatch.delenv(DEVICE_ORDER_VARIABLE)
    number_devices_like_nvidia_smi()
    assert os.environ.pop(DEVICE_ORDER_VARIABLE) == "PCI_BUS_ID"


DRIVER = "int cuDriverGetVersion(int *version) { *version = 12080; return 0; }"


def test_without_a_driver_there_is_no_version_of_it(tmp_path: Path) -> None:
    empty = tmp_path / "libcuda.so.1"
    empty.touch()
    for library in ("libno_such_driver.so.1", str(empty), "libc.so.6"):
        facts = read_cuda_facts("13.0", library)
        assert (facts.built_for, facts.driver) == ((13, 0), None)
    assert read_cuda_facts(None).built_for is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_driver_is_asked_for_its_version(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=DRIVER, text=True, check=True, timeout=60)
    facts = read_cuda_facts("13.0", str(library))
    assert facts.driver == (12, 8)
    assert "needs CUDA 13.0, the NVIDIA driver supports 12.8" in (cuda_problem(facts) or "")
    assert read_cuda_facts("12.6.20", str(library)).built_for == (12, 6)


CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("settings", "device", "native", "expected"),
    [
        ({}, CPU, True, "bfloat16"),
        ({}, CPU, False, "float32"),
        ({"dtype": "bfloat16"}, CPU, False, "bfloat16"),
        ({"dtype": "float32"}, CPU, True, "float32"),
        ({}, CUDA, False, "bfloat16"),
        ({"dtype": "float32"}, CUDA, True, "float32"),
    ],
)
def test_auto_is_what_the_processor_multiplies(
    settings: dict[str, Any],
    device: torch.device,
    native: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_device, "multiplies_bfloat16", lambda: native)
    assert choose_dtype(EngineConfig(**settings), device) == expected


def test_without_instructions_the_log_says_what_it_costs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    for dtype, native in (("bfloat16", False), ("auto", False), ("auto", True)):
        config = EngineConfig(dtype=dtype)  # type: ignore[arg-type]
        monkeypatch.setattr(runner_device, "multiplies_bfloat16", lambda native=native: native)
        log_dtype(config, CPU, choose_dtype(config, CPU))
    assert [record.message for record in caplog.records] == ["engine.slow_dtype", "engine.dtype"]


def test_the_default_is_what_this_processor_says() -> None:
    expected = "bfloat16" if multiplies_bfloat16() else "float32"
    assert choose_dtype(EngineConfig(), CPU) == expected
