"""`splitserve doctor --device`: verdicts from a self-test's answer, and a self-test that gives none."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from launcher.cli.client import doctor
from launcher.cli.client.doctor import self_test_of
from launcher.cli.main import main
from launcher.cluster.doctor import device_names, device_verdicts, is_slow


def check(name: str, why: str = "") -> dict[str, Any]:
    instead = "steps run without CUDA graphs" if why else ""
    return {"name": name, "passed": not why, "seconds": 0.24, "why": why, "instead": instead}


def answer(*checks: dict[str, Any]) -> dict[str, Any]:
    return {"device": "cuda:0", "name": "A device", "checks": checks}


@pytest.mark.parametrize(
    ("gpus", "visible", "names"),
    [
        (0, None, ["cpu"]),
        (0, "0", ["cpu"]),
        (2, None, ["cuda:0", "cuda:1"]),
        (8, "3,5", ["cuda:0", "cuda:1"]),
        (8, "", ["cpu"]),
    ],
)
def test_every_device_that_a_process_sees(gpus: int, visible: str | None, names: list[str]) -> None:
    assert device_names(gpus, visible) == names


def test_checks_that_passed_and_failed() -> None:
    found = device_verdicts(
        answer(check("attention"), check("graphs", "off by 1"), check("transfer", "no CUDA"))
    )
    assert [(each.subject, each.verdict) for each in found] == [
        ("attention kernels", "ok"),
        ("CUDA graphs", "slow"),
        ("KV write to itself", "slow"),
    ]
    assert found[1].text == "off by 1"
    assert found[1].advice == "a worker warns and goes on: steps run without CUDA graphs"
    assert found[2].advice.startswith("a worker ends with this error")
    assert is_slow(found)
    assert not is_slow(device_verdicts(answer(check("attention"))))


def test_a_self_test_without_an_answer() -> None:
    def ended(code: str) -> str:
        name, (verdict,) = self_test_of("cuda:0", [sys.executable, "-c", code])
        assert (name, verdict.verdict) == ("cuda:0", "slow")
        return verdict.text

    assert ended("import os; os.abort()") == "ended with signal 6; no output"
    assert ended("import sys; sys.exit('error: cuda:0 is broken')") == "cuda:0 is broken"
    _, (verdict,) = self_test_of("cuda:0", [sys.executable, "-c", "input()"], limit_s=0.0)
    assert verdict.text == "did not end in 0 s"


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(check("attention"), check("graphs", "off by 1"))
    code = f"print({json.dumps(found)!r})"
    monkeypatch.setattr(doctor, "TEST", (sys.executable, "-c", code))
    monkeypatch.setattr(doctor, "all_devices", lambda: ["cuda:0"])
    assert main(["doctor", "--device"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("cuda:0 (A device)\n")
    assert "failed: off by 1" in printed
    assert main(["doctor", "--device", "--json"]) == 1
    assert list(json.loads(capsys.readouterr().out)["devices"]) == ["cuda:0 (A device)"]
