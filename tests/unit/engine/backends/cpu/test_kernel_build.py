"""Compiling the cpu's kernels: once, and with a reason where it cannot be."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.cpu import build
from engine.runner import model_loader
from splitserve.config.engine import EngineConfig
from splitserve.errors import UnavailableError
from tests.support.waiting import PATIENCE_S

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a processor that has all."""
    monkeypatch.setenv("SPLITSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(build, "_processor_features", lambda: build.NEEDED)
    monkeypatch.setattr(build, "_may_use_tiles", lambda: True)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    return tmp_path / "home"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    logged: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(model_loader, "log_event", lambda event, **fields: logged.append((event, fields)))
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
    assert model_loader.cpu_kernels(EngineConfig(), "bfloat16", CPU) is None
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
    monkeypatch: pytest.MonkeyPatch, events: list[tuple[str, dict[str, Any]]], tmp_path: Path, home: Path
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
    assert model_loader.cpu_kernels(off, "bfloat16", CPU) is None
    assert model_loader.cpu_kernels(EngineConfig(), "float32", CPU) is None
    assert model_loader.cpu_kernels(EngineConfig(), "bfloat16", torch.device("meta")) is None
    assert events == []


@pytest.fixture
def empty_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compiler that makes empty libraries, and the file with the options that it was called with."""
    real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("no compiler")
    calls = tmp_path / "calls"
    text = (
        f'case "$1" in -print*) exec {real} "$@";; esac; '
        f'echo "$*" >> {calls}; for last; do :; done; exec {real} -shared -x c++ /dev/null -o "$last"'
    )
    use_compiler(monkeypatch, script(tmp_path, text))
    return calls


def test_a_prebuilt_library_of_the_most_capable_level_needs_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path, empty_libraries: Path
) -> None:
    made = build.prebuild(build.PREBUILT)
    assert sorted(path.name for path in made) == sorted(path.name for path in build.PREBUILT.iterdir())
    assert build.prebuild(build.PREBUILT) == []
    calls = empty_libraries.read_text().splitlines()
    assert len(calls) == len(build.LEVELS)
    assert not any("native" in call for call in calls)
    use_compiler(monkeypatch, None)
    taken = []
    for level in build.LEVELS:
        monkeypatch.setattr(build, "_processor_features", lambda level=level: level.needs | {"more"})
        taken.append(build.load_library()._name)
    assert taken == [str(path) for path in made]
    assert not home.exists()


def test_a_prebuilt_library_of_other_sources_is_passed_over_and_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_libraries: Path
) -> None:
    before = build.prebuild(build.PREBUILT)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DANOTHER"))
    assert build.prebuilt_library(build.NEEDED) is None
    after = build.prebuild(build.PREBUILT)
    assert set(build.PREBUILT.iterdir()) == set(after)
    assert not set(after) & set(before)


def test_the_kernels_compile_for_every_level(tmp_path: Path) -> None:
    """With what a compiler says where an instruction is not of the level."""
    if build.platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("no compiler for x86-64")
    level = build.LEVELS[-1]
    source = str(build.SOURCES / build.MAIN)
    done = subprocess.run(
        ["g++", *build.FLAGS, "-O0", *level.flags, "-fsyntax-only", source],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("allowed", [True, False])
def test_tile_registers_are_used_where_the_system_allows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_libraries: Path, allowed: bool
) -> None:
    """Prebuilt or compiled, the library is one for them only where the processor and the system have them."""
    monkeypatch.setattr(build, "_processor_features", lambda: build.LEVELS[0].needs)
    monkeypatch.setattr(build, "_may_use_tiles", lambda: allowed)
    build.load_library()
    assert (build.WITHOUT_AMX[0] in empty_libraries.read_text()) == (not allowed)
    made = build.prebuild(build.PREBUILT)
    assert build.load_library()._name == str(made[0 if allowed else 1])
