"""Compiling the cpu's kernels: once, and with a reason where it cannot be."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import torch_runner
from engine.cpu import build
from splitserve.config import EngineConfig
from splitserve.errors import UnavailableError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a processor that has all."""
    monkeypatch.setenv("SPLITSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(build, "_processor_features", lambda: build.NEEDED)
    return tmp_path / "home"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    logged: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(torch_runner, "log_event", lambda event, **fields: logged.append((event, fields)))
    return logged


def script(folder: Path, text: str) -> str:
    """A compiler that does what a shell script says."""
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def use_compiler(monkeypatch: pytest.MonkeyPatch, compiler: str | None) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: compiler if name == "c++" else None)


def refused(events: list[tuple[str, dict[str, Any]]], reason: str) -> None:
    """Both say so: the kernels with an error, the runner in a log line as it goes on without them."""
    with pytest.raises(UnavailableError, match=reason) as error:
        build.load_library()
    assert "\n" not in error.value.message
    assert torch_runner.cpu_kernels(EngineConfig(), "bfloat16", CPU) is None
    assert events == [("engine.cpu_kernels_off", {"why": error.value.message})]


def test_a_processor_that_lacks_something(
    monkeypatch: pytest.MonkeyPatch, events: list[tuple[str, dict[str, Any]]]
) -> None:
    features = build.NEEDED - {"avx512_bf16", "avx512vl"}
    monkeypatch.setattr(build, "_processor_features", lambda: features)
    refused(events, "the processor lacks avx512_bf16, avx512vl")


def test_another_kind_of_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert build._processor_features() == frozenset()


def test_no_compiler(
    monkeypatch: pytest.MonkeyPatch, events: list[tuple[str, dict[str, Any]]], home: Path
) -> None:
    use_compiler(monkeypatch, None)
    refused(events, r"no C\+\+ compiler")
    assert not home.exists()


def test_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    events: list[tuple[str, dict[str, Any]]],
    tmp_path: Path,
    home: Path,
) -> None:
    use_compiler(monkeypatch, script(tmp_path, "echo 'unknown flag' >&2; echo more >&2; exit 1"))
    refused(events, "failed: unknown flag$")
    assert list((home / "kernels").iterdir()) == [], "nothing is left behind"


def test_a_compiler_that_fails_silently_or_makes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_compiler(monkeypatch, script(tmp_path, "exit 3"))
    with pytest.raises(UnavailableError, match="no message"):
        build.load_library()
    use_compiler(monkeypatch, script(tmp_path, "exit 0"))
    with pytest.raises(UnavailableError, match="cannot be compiled"):
        build.load_library()


def test_a_compiler_that_takes_too_long_or_cannot_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hangs(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, build.TIMEOUT_S)

    use_compiler(monkeypatch, str(tmp_path / "nothing"))
    with pytest.raises(UnavailableError, match="No such file"):
        build.load_library()
    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(UnavailableError, match="timed out"):
        build.load_library()


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path) -> None:
    use_compiler(monkeypatch, script(tmp_path, "exit 0"))
    home.write_text("not a folder")
    with pytest.raises(UnavailableError, match="cannot be compiled"):
        build.load_library()


def test_what_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_compiler(monkeypatch, script(tmp_path, 'for last; do :; done; echo garbage > "$last"'))
    with pytest.raises(UnavailableError, match="cannot be loaded"):
        build.load_library()


def test_compiled_once_for_each_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    """By a compiler that makes an empty library and counts how often it is called."""
    real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("no compiler")
    counter = tmp_path / "calls"
    text = f'echo >> {counter}; for last; do :; done; exec {real} -shared -x c++ /dev/null -o "$last"'
    use_compiler(monkeypatch, script(tmp_path, text))
    for _ in range(3):
        build.load_library()
    assert counter.read_text() == "\n"
    assert len(list((home / "kernels").iterdir())) == 1
    monkeypatch.setattr(build, "_processor_features", lambda: build.NEEDED | {"another"})
    build.load_library()
    assert counter.read_text() == "\n\n"


def test_kernels_are_for_bfloat16_on_cpu(events: list[tuple[str, dict[str, Any]]]) -> None:
    off = EngineConfig.model_validate({"cpu_kernels": "off"})
    assert torch_runner.cpu_kernels(off, "bfloat16", CPU) is None
    assert torch_runner.cpu_kernels(EngineConfig(), "float32", CPU) is None
    assert torch_runner.cpu_kernels(EngineConfig(), "bfloat16", torch.device("meta")) is None
    assert events == []
