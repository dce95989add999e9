"""The GPU checklist with stand-ins for its parts: outcomes, limits, missing packages, the report."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dev import gpu_check
from dev.gpu_check import CheckPart, check, find_device, parts, read_bench, read_self_test, run_part
from dev.gpu_report import Outcome, PackageState, package_states, read_tests
from tests.support.waiting import PATIENCE_S

DEVICE = {"name": "A device", "capability": "9.0", "memory_bytes": 80 * 2**30}
PYTEST = """\
tests/gpu/test_a.py::test_one PASSED                                     [ 25%]
tests/gpu/test_a.py::test_two[a b] FAILED                                [ 50%]
tests/gpu/test_a.py::test_three SKIPPED (no peer)                       [ 75%]
tests/gpu/test_a.py::test_four ERROR                                     [100%]
FAILED tests/gpu/test_a.py::test_two[a b] - assert 0
"""


def plain(output: str) -> tuple[Outcome, str, dict[str, Any]]:
    return ("passed" if "good" in output else "failed"), output.strip(), {}


def stand_in(name: str, code: str, limit_s: float = 60, needs: tuple[str, ...] = ()) -> CheckPart:
    return CheckPart(name, [sys.executable, "-c", textwrap.dedent(code)], limit_s, needs, plain)


def run(part: CheckPart, folder: Path, missing: frozenset[str] = frozenset()) -> gpu_check.PartResult:
    return run_part(part, part.limit_s, missing, folder)


def test_a_failing_part_does_not_stop_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        stand_in("first", "print('good')"),
        stand_in("second", "import sys; print('the reason', file=sys.stderr); sys.exit(3)"),
        stand_in("third", "print('good')", needs=("no_such.package",)),
        stand_in("fourth", "print('good')"),
    ]
    packages = [PackageState("no-such-package", ">=1", None), PackageState("torch", ">=2.11", "2.11.0")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_check, "_packages", lambda needed: packages)
        assert not check(DEVICE, asked, tmp_path)
    printed = capsys.readouterr().out
    assert "no-such-package: missing (>=1)" in printed
    assert "second: failed" in printed
    written = json.loads((tmp_path / "report.json").read_text())
    assert [part["outcome"] for part in written["parts"]] == ["passed", "failed", "not run", "passed"]
    assert written["parts"][1]["tail"] == ["the reason"]
    assert written["parts"][2]["summary"] == "missing: no_such.package"
    assert written["device"] == DEVICE
    assert not written["passed"]
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# GPU check: not passed")
    assert "| second | failed |" in text
    assert "    the reason" in text
    assert "| no-such-package | >=1 | - | missing |" in text


@pytest.mark.slow
def test_a_part_that_hangs_ends_with_all_that_it_started(tmp_path: Path) -> None:
    code = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        print(child.pid, "good", flush=True)
        child.wait()
    """
    # Long enough that a busy machine starts both.
    result = run(stand_in("hangs", code, limit_s=8), tmp_path)
    assert result.outcome == "timed out"
    assert result.summary.startswith("after 8 s; ")
    child = int(result.summary.split()[-2])
    with suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(PATIENCE_S)


def test_the_last_parts_get_what_is_left_of_the_total(tmp_path: Path) -> None:
    never = stand_in("late", "print('good')")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_check, "_packages", lambda needed: [])
        assert not check(DEVICE, [never], tmp_path, total_s=0.0)
    (part,) = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert (part["outcome"], part["summary"]) == ("not run", "no time was left")


def test_odd_ends_of_a_part(tmp_path: Path) -> None:
    ended = run(stand_in("ended", "import sys; print('good', flush=True); sys.exit(1)"), tmp_path)
    assert (ended.outcome, ended.summary) == ("failed", "exit code 1; good")
    absent = CheckPart("absent", ["/no/such/program"], 5, (), plain)
    assert run(absent, tmp_path).summary == "cannot be started: No such file or directory"
    silent = CheckPart("silent", [sys.executable, "-c", "print('{')"], 60, (), read_self_test)
    assert run(silent, tmp_path).summary == "its result cannot be read: no JSON object in its output"


def test_a_part_has_the_callers_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "installed_there.py").write_text("word = 'good'")
    code = "import os, installed_there, dev.gpu_check; print(installed_there.word, os.environ['PYTHONPATH'])"
    monkeypatch.setenv("PYTHONPATH", str(packages))
    ran = run(stand_in("caller", code), tmp_path)
    assert (ran.outcome, ran.summary) == ("passed", f"good {gpu_check.ROOT}{os.pathsep}{packages}")
    monkeypatch.setenv("PYTHONPATH", "")
    # Not with an empty entry, which would be the folder where the part runs.
    alone = run(stand_in("alone", "import os; print('good', os.environ['PYTHONPATH'])"), tmp_path)
    assert alone.summary == f"good {gpu_check.ROOT}"


def test_of_two_installations_the_first_on_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, version in (("first", "2.11.0+cu130"), ("second", "2.99.0")):
        facts = tmp_path / folder / f"torch-{version}.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    for folder in ("second", "first"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    (torch,) = [package for package in gpu_check._packages(["torch"]) if package.name == "torch"]
    assert torch.installed == "2.11.0+cu130"


def test_results_of_pytest() -> None:
    outcome, summary, details = read_tests(PYTEST)
    assert (outcome, summary) == ("failed", "1 passed, 1 failed, 1 error, 1 skipped")
    assert details["failures"] == ["tests/gpu/test_a.py::test_two[a b]", "tests/gpu/test_a.py::test_four"]
    assert read_tests(PYTEST.splitlines()[0])[0] == "passed"
    assert read_tests(PYTEST.splitlines()[2])[:2] == ("failed", "1 skipped"), "nothing ran"
    assert read_tests("")[:2] == ("failed", "no test ran")


def test_results_of_the_self_test_and_the_bench() -> None:
    checks = [{"name": "attention", "passed": True}, {"name": "graphs", "passed": False}]
    log = "a line of the log\n{ not JSON\n"
    outcome, summary, _ = read_self_test(log + json.dumps({"checks": checks}, indent=2))
    assert (outcome, summary) == ("failed", "2 checks, failed: graphs")
    row = {"phase": "decode", "batch": 1, "context_tokens": 1024, "share_of_limit": 0.713}
    outcome, summary, _ = read_bench(json.dumps({"rows": [row]}))
    assert (outcome, summary) == ("passed", "decode 1x1024: 71% of the limit")


def test_packages_that_are_missing_or_old() -> None:
    asked = [
        "torch>=2.11,<3",
        "Nixl_cu13>=1.5,<2; sys_platform == 'linux'",
        "numpy>=2.0",
        "tool[extra]==1.2.3",
    ]
    states = package_states(asked, {"torch": "2.11.0+cu130", "numpy": "1.26.4", "tool": "1.2.3"}, ["triton"])
    assert [(state.name, state.wanted, state.remark) for state in states] == [
        ("nixl-cu13", ">=1.5,<2", "missing"),
        ("numpy", ">=2.0", "older than asked for"),
        ("tool", "==1.2.3", ""),
        ("torch", ">=2.11,<3", ""),
        ("triton", "", "missing"),
    ]
    assert not [state for state in gpu_check._packages(gpu_check.TESTS) if state.remark], (
        "this environment has all"
    )


def test_all_parts_together_take_less_than_ten_minutes() -> None:
    found = parts(DEVICE)
    assert [part.name for part in found] == ["self-test", "tests/gpu", "contract suites", "bench.engine"]
    assert sum(part.limit_s for part in found) < 600
    assert gpu_check.TOTAL_S < 600
    assert "llama-3.1-8b" in found[-1].command
    assert "smollm2-135m" in parts(DEVICE | {"memory_bytes": 16 * 2**30})[-1].command


def test_a_machine_without_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "find_device", lambda: {"why": "torch 2.11 finds none"})
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == "gpu_check: no CUDA device: torch 2.11 finds none\n"
    assert find_device([sys.executable, "-c", "import no_such_module"]) == {
        "why": "ModuleNotFoundError: No module named 'no_such_module'"
    }
