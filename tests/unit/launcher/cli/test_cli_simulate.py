"""`splitserve simulate`: output, and wrong inputs."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import simulate
from launcher.cli.main import main

POLICY = "prefill: {target_ms: 2000}\ndecode: {target_ms: 100}\n"
SHORT = ("--trace", "constant", "--duration", "30", "--rate", "5", "--engine-preset", "h100-8b")


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return str(path)


def policies(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["policies"]
    return found


def test_json(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    assert main(["simulate", *SHORT, "--policy", policy, "--json"]) == 0
    (found,) = policies(capsys)
    assert found["policy"] == "policy"
    for name in ("attainment", "attainment_ttft", "attainment_tpot", "replica_hours", "actions"):
        assert isinstance(found[name], int | float), name
    assert found["failed_requests"] == 0
    assert found["attainment"] == 1
    assert set(found["phases_s"]["ttft"]) == {"p50", "p95", "p99"}


def test_without_a_policy_both_pools_follow_their_slo(
    capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    assert main(["simulate", *SHORT, "--json"]) == 0
    (found,) = policies(capsys)
    assert main(["simulate", *SHORT, "--json", "--policy", policy]) == 0
    own_cpu = {"cpu_ms_per_request": found["cpu_ms_per_request"]}
    assert found == policies(capsys)[0] | own_cpu


MICROSECONDS = [at * 500_000 for at in range(60)]
MAP = ("--columns", "timestamp=when,input_length=prompt,output_length=answer")


def log_of(path: Path, times: list[float]) -> Path:
    path.write_text("when,prompt,answer\n" + "".join(f"{at},900,50\n" for at in times))
    return path


@pytest.mark.parametrize("command", [["simulate"], ["plan", "--ttft-ms", "500"]])
@pytest.mark.parametrize(
    ("times", "days"),
    [
        (MICROSECONDS, "341"),
        ([1000 * at for at in MICROSECONDS], "3.41e+05"),
        ([at / 5 for at in MICROSECONDS], "68.3"),
        ([*range(59), 40 * 86_400], "40"),
    ],
    ids=["microseconds", "nanoseconds", "fives", "a gap"],
)
def test_times_in_another_unit_are_refused_by_both_commands(
    command: list[str], times: list[float], days: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = str(log_of(tmp_path / "log.csv", times))
    assert main([*command, "--trace", trace, *MAP, "--engine-preset", "h100-8b"]) == 2
    error = capsys.readouterr().err
    assert f"it lasts for {days} days, at most 31 can be replayed" in error
    assert "look at the unit of its times" in error


def test_what_a_gap_costs_does_not_grow_with_its_length(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = log_of(tmp_path / "log.csv", [*range(30), *(30 * 86_400 + at for at in range(30))])
    began_s = time.process_time()
    assert main(["simulate", "--trace", str(trace), *MAP, "--engine-preset", "h100-8b", "--json"]) == 0
    assert time.process_time() - began_s < 10
    (found,) = policies(capsys)
    assert (found["requests"], found["failed_requests"]) == (60, 0)


@pytest.mark.parametrize("command", [["simulate"], ["plan"]])
def test_a_compressed_log_is_read_by_both_commands(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain = log_of(tmp_path / "log.csv", [at / 2 for at in range(60)])
    packed = tmp_path / "log.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert main([*command, "--trace", str(packed), *MAP, "--engine-preset", "h100-8b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_policies_are_compared_on_the_same_trace(
    capsys: pytest.CaptureFixture[str], policy: str, tmp_path: Path
) -> None:
    fixed = tmp_path / "ample.yaml"
    fixed.write_text(
        "prefill: {target_ms: 2000, min_replicas: 4}\ndecode: {target_ms: 100, min_replicas: 4}\n"
    )
    both = ("--policy", policy, "--policy", str(fixed))
    assert main(["simulate", *SHORT, *both, "--json"]) == 0
    first, second = policies(capsys)
    assert (first["policy"], second["policy"]) == ("policy", "ample")
    assert first["requests"] == second["requests"]
    assert first["replica_hours"] < second["replica_hours"]
    assert main(["simulate", *SHORT, *both]) == 0
    text = capsys.readouterr().out
    assert "policy" in text
    assert "ample" in text
    assert main(["simulate", *SHORT, *both[:2], *both[:2]]) == 2
    assert "the same file is given twice" in capsys.readouterr().err


def test_without_a_policy_there_are_replicas_enough_for_a_scaled_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate._policies(None, None, None, 10)["policy"].prefill.max_replicas == 20
    assert simulate._policies(None, None, None, None)["policy"].decode.max_replicas == 8
    for wrong in (("--ttft-ms", "0"), ("--tpot-ms", "nan"), ("--peak-replicas", "-1")):
        assert main(["simulate", *SHORT, *wrong]) == 2
        assert "must be" in capsys.readouterr().err


ROLE_MOVES = """
prefill:
  kind: schedule
  schedule: [{start: "00:06", end: "00:10", replicas: 2}]
  behavior: {scaleDown: {stabilizationWindowSeconds: 0}}
decode:
  kind: schedule
  schedule: [{start: "00:00", end: "00:05", replicas: 2}]
  behavior: {scaleDown: {stabilizationWindowSeconds: 0}}
"""


def test_workers_change_their_roles_where_they_can(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """After five minutes decode gives up what prefill wants."""
    path = tmp_path / "moves.yaml"
    path.write_text(ROLE_MOVES)
    options = ["simulate", "--trace", "constant", "--rate", "0.2", "--duration", "590", "--policy", str(path)]
    actions = []
    for more in ([], ["--role-moves"]):
        assert main([*options, "--json", *more]) == 0
        actions.append(json.loads(capsys.readouterr().out)["policies"][0]["actions_by_kind"])
    assert actions[0]["start"] == 2
    assert actions[1] == {"start": 1, "change_role": 1}


def test_cold_starts_by_chance(capsys: pytest.CaptureFixture[str]) -> None:
    by_chance = ("--cold-start", "20", "--cold-start-p95", "60", "--failed-starts", "0.1")
    assert main(["simulate", *SHORT, *by_chance]) == 0
    captured = capsys.readouterr()
    assert "cold start 20 s, p95 60 s, 10% fail" in captured.out
    assert "replica." not in captured.err


def test_table(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    assert main(["simulate", *SHORT, "--policy", policy]) == 0
    text = capsys.readouterr().out
    assert "constant" in text
    assert "100.00%" in text


def test_a_trace_file_at_scale(capsys: pytest.CaptureFixture[str], policy: str, tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = "\r\n".join(f"2023-11-16 18:15:{n:02d}.1234567,800,20" for n in range(60))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\r\n{rows}")
    arguments = ["simulate", "--trace", str(trace), "--policy", policy, "--json"]
    assert main([*arguments, "--scale", "3"]) == 0
    (found,) = policies(capsys)
    assert found["requests"] == 180
    assert main([*arguments, "--peak-replicas", "2", "--engine-preset", "h100-8b"]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("--peak-replicas", "2"), 2, "'--trace'"),
        (("--trace", "constant", "--policy", "/no/such"), 2, "cannot read /no/such"),
        (("--trace", "/no/such.csv"), 2, "cannot read /no/such.csv"),
        (("--trace", "constant", "--columns", "timestamp=a"), 2, "columns: trace constant is made"),
        ((*SHORT, "--cold-start", "-1"), 2, "cold_start must be at least 0, not -1"),
        ((*SHORT, "--cold-start", "nan"), 2, "cold_start must be at least 0"),
        ((*SHORT, "--cold-start-p95", "59"), 2, "cold_start_p95 must be at least the median"),
        ((*SHORT, "--failed-starts", "1"), 2, "failed_starts must be at least 0 and below 1, not 1"),
        ((*SHORT, "--ttft-ms", "0"), 2, "ttft_ms must be above 0, not 0"),
        ((*SHORT, "--peak-replicas", "0"), 2, "peak_replicas must be above 0"),
        ((*SHORT, "--peak-replicas", "4", "--scale", "2"), 2, "exclude each other"),
        ((*SHORT, "--scale", "inf"), 2, "scale must be above 0"),
        ((*SHORT, "--admission", "on"), 2, "'on' is not one of 'queue', 'off'"),
        ((*SHORT, "--engine-preset", "abacus"), 2, "no such preset: 'abacus'"),
        (("--trace", "constant", "--rate", "0"), 2, "rate must be above 0"),
        (("--trace", "constant", "--duration", "nan"), 2, "duration_s must be above 0"),
        ((*SHORT, "--prompt-tokens", "0"), 2, "prompt_tokens must be above 0"),
        (("--trace", "constant", "--duration", "1e9"), 2, "are more than 2000000"),
    ],
)
def test_wrong_inputs(
    capsys: pytest.CaptureFixture[str], policy: str, arguments: tuple[str, ...], code: int, part: str
) -> None:
    given = [*arguments] if "--policy" in arguments else [*arguments, "--policy", policy]
    assert main(["simulate", *given]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert part in captured.err
