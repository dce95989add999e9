"""`splitserve plan`: output, and wrong inputs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from autoscaler.sizing.engine_model import PRESETS
from splitserve.cli.advisor.plan_table import plan_text
from splitserve.cli.main import main

SHAPE = ("--params", "8B", "--layers", "32", "--heads", "32", "--kv-heads", "8", "--head-dim", "128")
LIGHT = ("--rate", "4", "--prompt-tokens", "p50=400,p95=1500", "--output-tokens", "60")
pytestmark = pytest.mark.timeout(60)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_from_a_gpu_and_the_figures_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*SHAPE, "--gpu", "h100", *LIGHT, "--slo-ttft", "500", "--slo-tpot", "30", "--price", "2.5")
    found = planned(capsys, *arguments)
    assert found == planned(capsys, *arguments)
    assert found["split"]["name"] == "1P:1D"
    assert (found["split"]["prefill_gpus"], found["split"]["decode_gpus"]) == (1, 1)
    assert found["split"]["cost_per_hour"] == 5.0
    assert found["currency"] == "USD"
    assert found["slo"] == {"ttft_s": 0.5, "tpot_s": 0.03}
    assert found["replica"]["weights_gb"] == 16.0
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "Take " in text
    assert "A replica is 1 x h100: weights 16.0 GB" in text


def test_from_a_log_and_a_measured_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    engine, log = tmp_path / "engine.json", tmp_path / "log.csv"
    engine.write_text(json.dumps(asdict(PRESETS["h100-8b"])))
    log.write_text("when,prompt,answer\n" + "".join(f"{at * 0.5},900,50\n" for at in range(60)))
    read = ("--trace", str(log), "--columns", "timestamp=when,input_length=prompt,output_length=answer")
    found = planned(capsys, *read, "--engine-model", str(engine), "--gpus-per-replica", "2")
    assert found["traffic"]["requests"] == 60
    assert found["replica"]["engine"] == asdict(PRESETS["h100-8b"])
    assert found["split"]["gpus"] == 4
    busy = planned(capsys, *read, "--engine-model", str(engine), "--time-scale", "20", "--ttft-ms", "300")
    assert busy["traffic"]["requests_per_second"] == pytest.approx(40, rel=0.05)
    assert busy["split"]["prefill_gpus"] > 1
    assert planned(capsys, *read, "--engine-model", str(engine), "--scale", "3")["traffic"]["requests"] == 180
    assert main(["simulate", *read, "--no-bound", "--json"]) == 0
    assert main(["advise", *read, "--engine-model", str(engine), "--json"]) == 0


def test_prices_and_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prices, config = tmp_path / "prices.yaml", tmp_path / "tiny" / "config.json"
    prices.write_text("currency: EUR\ngpu_hour: {L4: 0.5}\n")
    config.parent.mkdir()
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152, "num_hidden_layers": 30}
    config.write_text(json.dumps(sizes | {"num_attention_heads": 9, "num_key_value_heads": 3}))
    found = planned(
        capsys,
        "--model",
        str(config),
        "--gpu",
        "L4",
        *LIGHT,
        "--prices",
        str(prices),
        "--weight-dtype",
        "fp8",
    )
    assert found["model"]["name"] == "tiny"
    assert found["model"]["weights"] == "fp8"
    assert found["currency"] == "EUR"
    assert found["best"] == "colocated"
    assert found["colocated"]["cost_per_hour"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "give either --trace FILE or --rate R"),
        (("--rate", "1", "--trace", "x"), 2, "give either"),
        (("--rate", "1"), 2, "give --model and --gpu, or --engine-model"),
        (("--rate", "1", "--gpu", "H100"), 2, "give --model and --gpu"),
        (("--rate", "0", *SHAPE, "--gpu", "H100"), 2, "rate must be above 0"),
        (("--rate", "nan", *SHAPE, "--gpu", "H100"), 2, "rate must be above 0"),
        (("--rate", "1", *SHAPE, "--gpu", "TPU"), 2, "gpu: not known: 'TPU'"),
        (
            ("--rate", "1", "--gpu", "H100", "--model", "/none/config.json"),
            2,
            "cannot read /none/config.json",
        ),
        (("--rate", "1", "--gpu", "H100", "--params", "8B"), 2, "layers is not known"),
        (
            ("--rate", "1", *SHAPE, "--gpu", "H100", "--columns", "timestamp=a"),
            2,
            "columns: there is no --trace",
        ),
        (("--rate", "1", *SHAPE, "--gpu", "H100", "--prompt-tokens", "p1"), 2, "prompt_tokens: a length"),
        (("--rate", "1", *SHAPE, "--gpu", "H100", "--prompt-tokens", "999999"), 1, "longest request has"),
        (("--rate", "1", *SHAPE, "--gpu", "L4", "--gpus-per-replica", "3"), 2, "do not divide among 3"),
        (("--rate", "1", *SHAPE, "--gpu", "H100", "--slo-tpot", "1"), 1, "even an idle replica keeps only"),
        (("--rate", "1", *SHAPE, "--gpu", "H100", "--price", "-1"), 2, "price must be"),
        (("--rate", "1", *SHAPE, "--gpu", "H100", "--price", "1", "--prices", "x"), 2, "exclude each other"),
        (("--rate", "1", *SHAPE, "--gpu", "H100", "--goal", "2"), 2, "goal must be"),
        (("--rate", "1", *SHAPE, "--gpu", "H100", "--efficiency", "x=1"), 2, "efficiency: no such part"),
        (("--rate", "1", "--engine-model", "/none"), 2, "engine_model: cannot read /none"),
        (("--rate", "1e-9", *SHAPE, "--gpu", "H100"), 2, "fewer than two requests"),
        (
            ("--rate", "1", "--scale", "1e6", *SHAPE, "--gpu", "H100"),
            2,
            "scale: 1.97e+09 requests are more than",
        ),
        (("--rate", "1", "--time-scale", "1e-6", *SHAPE, "--gpu", "H100"), 2, "trace: it lasts for"),
        (("--rate", "1e6", *SHAPE, "--gpu", "H100"), 1, "no number of replicas up to 256"),
    ],
)
def test_wrong_input(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    got = main(["plan", *arguments])
    captured = capsys.readouterr()
    assert (got, captured.out) == (code, ""), captured.err
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_what_was_not_tried_is_not_said_to_fail(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*SHAPE, "--gpu", "H100", "--gpus-per-replica", "1", "--rate", "4", "--output-tokens", "9")
    found = planned(capsys, *arguments, "--price", "1", "--currency", "[/x]")
    cut = found | {"best": "split", "colocated": None, "out_of_time": True}
    assert "[/x] / h" in plan_text(cut)
    assert "the other kind was not seen to reach 95%" in plan_text(cut)
    assert "the other kind does not reach 95%" in plan_text(cut | {"out_of_time": False})


def test_a_gpu_without_a_price(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\n")
    assert main(["plan", *LIGHT, *SHAPE, "--gpu", "H100", "--prices", str(prices)]) == 2
    assert "has no gpu_hour for H100 (none)" in capsys.readouterr().err


def test_classes_of_a_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own, spot = {"name": "own", "price_per_hour": 2.5}, {"name": "spot", "price_per_hour": 1, "spot": True}
    pool = {"target_ms": 100, "classes": [own, spot], "on_demand_floor": 1}
    path = tmp_path / "policy.yaml"
    path.write_text(json.dumps({"prefill": pool, "decode": pool}))
    engine, log = tmp_path / "engine.json", tmp_path / "log.csv"
    engine.write_text(json.dumps(asdict(PRESETS["h100-8b"])))
    log.write_text("when,prompt,answer\n" + "".join(f"{at * 0.025},900,50\n" for at in range(60)))
    read = ("--trace", str(log), "--columns", "timestamp=when,input_length=prompt,output_length=answer")
    arguments = (*read, "--engine-model", str(engine), "--ttft-ms", "300")
    found = planned(capsys, *arguments, "--policy", str(path))
    shape, mix = found["split"]["candidate"], found["mix"]
    assert mix["decode"]["units"] == shape["decode"]
    assert shape["prefill"] > 1
    assert mix["prefill"]["classes"] == {"own": 1, "spot": shape["prefill"] - 1}
    assert 0 < mix["cost_per_million_tokens"] < mix["on_demand_cost_per_million_tokens"]
    assert main(["plan", *arguments, "--policy", str(path)]) == 0
    text = capsys.readouterr().out
    assert "prefill of the policy's classes: 1 own" in text
    assert "; without spot machines " in text
    path.write_text(json.dumps({"prefill": pool, "decode": {"target_ms": 100}}))
    assert main(["plan", *arguments, "--policy", str(path)]) == 2
    assert "policy: decode has no classes with prices" in capsys.readouterr().err
