"""`splitserve simulate`: output, plot, and wrong inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoscaler.simulation.evaluation.baselines import BASELINES
from splitserve.cli.main import main
from splitserve.cli.simulation import simulate

pytest.importorskip("matplotlib")
POLICY = "prefill: {target_ms: 2000}\ndecode: {target_ms: 100}\n"
SHORT = ("--trace", "constant", "--duration", "30", "--rate", "5", "--engine-preset", "h100-8b")


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return str(path)


def test_json(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    assert main(["simulate", *SHORT, "--policy", policy, "--baseline", "all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in (
        "attainment",
        "attainment_ttft",
        "attainment_tpot",
        "replica_hours",
        "replica_hours_bound",
        "actions",
    ):
        assert isinstance(found[name], int | float), name
    assert found["failed_requests"] == 0
    assert found["attainment"] == 1
    assert found["replica_hours_bound"] <= found["replica_hours"]
    assert set(found["opponents"]) == set(BASELINES)
    assert set(found["phases_s"]["ttft"]) == {"p50", "p95", "p99"}


def test_without_a_policy_both_pools_follow_their_slo(
    capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    assert main(["simulate", *SHORT, "--no-bound", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["simulate", *SHORT, "--no-bound", "--json", "--policy", policy]) == 0
    own_cpu = {"cpu_ms_per_request": found["cpu_ms_per_request"]}
    assert found == json.loads(capsys.readouterr().out) | own_cpu


def test_without_a_policy_there_are_replicas_enough_for_a_scaled_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate._default_policy(None, None, 10).prefill.max_replicas == 20
    assert simulate._default_policy(None, None, None).decode.max_replicas == 8
    for wrong in (("--ttft-ms", "0"), ("--tpot-ms", "nan"), ("--peak-replicas", "-1")):
        assert main(["simulate", *SHORT, "--no-bound", *wrong]) == 2
        assert "must be" in capsys.readouterr().err


def test_cold_starts_by_chance(capsys: pytest.CaptureFixture[str]) -> None:
    by_chance = ("--cold-start", "20", "--cold-start-p95", "60", "--failed-starts", "0.1")
    assert main(["simulate", *SHORT, "--no-bound", *by_chance, "--baseline", "static-best"]) == 0
    captured = capsys.readouterr()
    assert "cold start 20 s, p95 60 s, 10% fail" in captured.out
    assert "static-best" in captured.out
    assert "replica." not in captured.err


def test_neutral_workers_change_sides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = tmp_path / "neutral.yaml"
    policy.write_text(f"workers: neutral\n{POLICY}")
    options = (*SHORT, "--no-bound", "--policy", str(policy), "--baseline", "static-neutral")
    assert main(["simulate", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for run in (found, found["opponents"]["static-neutral"]):
        assert set(run["leaning_changes"]) == {"prefill", "decode"}
        assert (run["failed_requests"], run["attainment"]) == (0, 1)
    assert main(["simulate", *options]) == 0
    assert "changes of sides: " in capsys.readouterr().out
    assert main(["simulate", *options[:-2], "--steps", "--hybrid", "off"]) == 2
    assert "hybrid: on" in capsys.readouterr().err


@pytest.mark.parametrize("hybrid", [(), ("--hybrid", "off")])
def test_step_by_step(capsys: pytest.CaptureFixture[str], hybrid: tuple[str, ...]) -> None:
    assert main(["simulate", *SHORT, "--no-bound", "--json", "--steps", *hybrid]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["attainment"], found["failed_requests"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_table_and_plot(capsys: pytest.CaptureFixture[str], policy: str, tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"run{suffix}"
    assert main(["simulate", *SHORT, "--policy", policy, "--no-bound", "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "constant" in text
    assert "100.00%" in text
    assert picture.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_a_trace_file_at_scale(capsys: pytest.CaptureFixture[str], policy: str, tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = "\r\n".join(f"2023-11-16 18:15:{n:02d}.1234567,800,20" for n in range(60))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\r\n{rows}")
    arguments = ["simulate", "--trace", str(trace), "--policy", policy, "--no-bound", "--json"]
    assert main([*arguments, "--scale", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 180
    assert found["replica_hours_bound"] is None
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
        ((*SHORT, "--attainment-bar", "2"), 2, "attainment_bar must be above 0 and at most 1"),
        ((*SHORT, "--opponent", "me"), 2, "no such baseline: 'me'"),
        ((*SHORT, "--engine-preset", "abacus"), 2, "no such preset: 'abacus'"),
        ((*SHORT, "--prefix-cache", "magic"), 2, "prefix_cache must be worker, pool, off"),
        ((*SHORT, "--prefix-cache", "pool", "--steps"), 2, "an engine has a cache of its own"),
        ((*SHORT, "--prompt-tokens", "500000", "--steps"), 2, "a replica holds"),
        ((*SHORT, "--hybrid", "on"), 2, "computed step by step (--steps)"),
        ((*SHORT, "--hybrid", "always"), 2, "hybrid must be on or off"),
        ((*SHORT, "--plot", "run.jpeg"), 2, "must end in .png or .svg"),
        ((*SHORT, "--plot", "/no/such/run.png"), 2, "no such folder: /no/such"),
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


@pytest.fixture
def models(tmp_path: Path) -> str:
    pool = "max_replicas: 4, classes: [{name: only, price_per_hour: 2}]"
    for name in ("a", "a=b"):
        text = f"prefill: {{target_ms: 2000, {pool}}}\ndecode: {{target_ms: 100, {pool}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    path = tmp_path / "models.yaml"
    listed = "{name: a, policy: a.yaml}, {name: a=b, policy: a=b.yaml}"
    path.write_text(f"budget_per_hour: 10\nmodels: [{listed}]\n")
    return str(path)


def test_models_on_one_budget(capsys: pytest.CaptureFixture[str], models: str) -> None:
    traces = ["--trace", "a=constant,rate=5", "--trace", "a=b=constant,duration=20,shift=5"]
    command = ["simulate", "--models", models, *traces, *SHORT[2:]]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["models"]) == {"a", "a=b"}
    assert found["models"]["a"]["requests"] > found["models"]["a=b"]["requests"] > 0
    assert found["shared"] == {"money": {"limit": 10.0, "most_used": 8.0}}
    assert found["total"]["attainment"] == 1
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "2 models on 10 money" in text
    assert "most at once: 8 of 10 money\n" in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--trace", "a=constant"), "trace: a=b has none"),
        (("--trace", "constant"), "trace: must be MODEL=TRACE for a model of the file (a, a=b)"),
        (("--trace", "a=constant", "--trace", "a=ramp"), "trace: a has two"),
        (("--trace", "a=constant,pace=3"), "trace: pace of a is none of rate, "),
        (("--trace", "a=constant,seed=1.5"), "trace: seed of a must be a number, not '1.5'"),
        (("--trace", "a=constant,shift=-1", "--trace", "a=b=constant"), "shift must be at least 0, not -1"),
        (("--trace", "a=constant", "--policy", "x.yaml"), "policy is for one model"),
        (("--trace", "a=constant", "--baseline", "all"), "baseline is for one model"),
    ],
)
def test_wrong_traces_of_models(
    capsys: pytest.CaptureFixture[str], models: str, arguments: tuple[str, ...], part: str
) -> None:
    assert main(["simulate", "--models", models, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert part in captured.err


def test_several_traces_need_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", "constant", "--trace", "ramp"]) == 2
    assert "several need the models' file" in capsys.readouterr().err
