"""Other projects have an `engine` or a `worker` too: a clash is one line, and the user's own folder is not searched."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from launcher.cli.own_packages import PACKAGES, foreign_package
from splitserve.runtime.child_launch import python_module
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[4]


def test_all_are_ours() -> None:
    assert foreign_package() is None


def test_the_packages_are_those_of_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert sorted(pattern.removesuffix("*") for pattern in settings["include"]) == sorted(PACKAGES)


def test_a_foreign_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    (theirs := tmp_path / "worker" / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher", "--version"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {theirs} hides splitserve's package worker")
    assert done.stderr.count("\n") == 1


def test_a_damaged_package_is_named(tmp_path: Path) -> None:
    problem = foreign_package(tmp_path)
    assert problem is not None
    assert "package autoscaler is damaged" in problem


def test_sizes_of_another_installation_say_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    information = tmp_path / "splitserve-9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: splitserve\nVersion: 9\n")
    (information / "RECORD").write_text("worker/__init__.py,sha256=0,999999\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert version("splitserve") == "9"
    assert foreign_package() is None


def test_processes_look_for_modules_in_a_clone_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert "-P" not in python_module("launcher")
    monkeypatch.chdir(tmp_path)
    assert python_module("launcher") == (sys.executable, "-P", "-m", "launcher")
    tmp_path.rmdir()
    assert "-P" in python_module("launcher")
