"""`splitserve plan`: output, and wrong inputs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from autoscaler.simulation.engine_model import PRESETS
from launcher.cli.main import main
from launcher.cli.plan import plan_text

SHAPE = ("--model", "8b/config.json")
"""Llama-3.1-8B's, in the folder that a test runs in."""
LIGHT = ("--rate", "4", "--prompt-tokens", "p50=400,p95=1500", "--output-tokens", "60")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _model_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("8b").mkdir()
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 32}
    Path("8b/config.json").write_text(
        json.dumps(sizes | {"num_attention_heads": 32, "num_key_value_heads": 8})
    )


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_from_a_gpu_and_the_config_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*SHAPE, "--gpu", "h100", *LIGHT, "--slo-ttft", "500", "--slo-tpot", "30")
    found = planned(capsys, *arguments)
    assert found == planned(capsys, *arguments)
    assert found["split"]["name"] == "1P:1D"
    assert (found["split"]["prefill_gpus"], found["split"]["decode_gpus"]) == (1, 1)
    assert found["slo"] == {"ttft_s": 0.5, "tpot_s": 0.03}
    assert found["replica"]["weights_gb"] == pytest.approx(16.06, abs=0.01)
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "Take " in text
    assert "A worker is 1 x h100: weights 16.1 GB" in text


def test_from_a_log_and_a_preset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log, busy_log = tmp_path / "log.csv", tmp_path / "busy.csv"
    log.write_text("when,prompt,answer\n" + "".join(f"{at * 0.5},900,50\n" for at in range(60)))
    busy_log.write_text("when,prompt,answer\n" + "".join(f"{at * 0.025},900,50\n" for at in range(60)))
    read = ("--trace", str(log), "--columns", "timestamp=when,input_length=prompt,output_length=answer")
    preset = (*read, "--engine-preset", "h100-8b")
    found = planned(capsys, *preset, "--gpus-per-replica", "2")
    assert found["traffic"]["requests"] == 60
    assert found["replica"]["engine"] == asdict(PRESETS["h100-8b"])
    assert found["split"]["gpus"] == 4
    busy = planned(capsys, "--trace", str(busy_log), *preset[2:], "--ttft-ms", "300")
    assert busy["traffic"]["requests_per_second"] == pytest.approx(40, rel=0.05)
    assert busy["split"]["prefill_gpus"] > 1
    assert planned(capsys, *preset, "--scale", "3")["traffic"]["requests"] == 180
    assert main(["simulate", *read, "--json"]) == 0


def test_from_a_request_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    lines = [
        {
            "time": 1e9 + at * 0.5,
            "prompt_tokens": 900,
            "output_tokens": 50,
            "prefix_hashes": ["00000000000000ff"],
        }
        for at in range(40)
    ]
    log.write_text("".join(json.dumps(line | {"outcome": "completed"}) + "\n" for line in lines))
    found = planned(capsys, "--trace", str(log), "--engine-preset", "h100-8b")
    assert found["traffic"]["requests"] == 40
    assert found["split"]["name"] == "1P:1D"
    assert found["best"] == "colocated"
    assert main(["plan", "--trace", str(log), "--engine-preset", "h100-8b"]) == 0
    text = capsys.readouterr().out
    assert "Take colocated 1: 1 GPUs; 1P:1D takes 2." in text
    assert "A worker is 1 x GPU, as measured" in text


def test_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "tiny" / "config.json"
    config.parent.mkdir()
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152, "num_hidden_layers": 30}
    config.write_text(json.dumps(sizes | {"num_attention_heads": 9, "num_key_value_heads": 3}))
    found = planned(capsys, "--model", str(config), "--gpu", "L4", *LIGHT, "--weight-dtype", "fp8")
    assert found["model"]["name"] == "tiny"
    assert found["model"]["weights"] == "fp8"
    assert found["best"] == "colocated"
    assert found["colocated"]["gpus"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--gpu", "H100"), 2, "give either --trace FILE or --rate R"),
        (("--gpu", "H100", "--rate", "1", "--trace", "x"), 2, "give either"),
        (("--rate", "1"), 2, "give one of --target (a running cluster), --engine-preset, or --gpu"),
        (("--rate", "1", "--gpu", "H100", "--engine-preset", "h100-8b"), 2, "give one of"),
        (("--rate", "1", "--gpu", "H100"), 2, "give --model with --gpu"),
        (("--rate", "1", "--engine-preset", "abacus"), 2, "no such preset: 'abacus'"),
        (("--rate", "0", *SHAPE, "--gpu", "H100"), 2, "rate must be above 0"),
        (("--rate", "nan", *SHAPE, "--gpu", "H100"), 2, "rate must be above 0"),
        (("--rate", "1", *SHAPE, "--gpu", "TPU"), 2, "gpu: not known: 'TPU'"),
        (
            ("--rate", "1", "--gpu", "H100", "--model", "/none/config.json"),
            2,
            "cannot read /none/config.json",
        ),
        (("--rate", "1", *SHAPE, "--gpu", "H100", "--weight-dtype", "fp3"), 2, "weight_dtype must be"),
        (
            ("--rate", "1", *SHAPE, "--gpu", "H100", "--columns", "timestamp=a"),
            2,
            "columns: there is no --trace",
        ),
        (
            ("--rate", "1", *SHAPE, "--gpu", "H100", "--prompt-tokens", "p1"),
            2,
            "prompt_tokens: expected a length",
        ),
        (("--rate", "1", *SHAPE, "--gpu", "H100", "--prompt-tokens", "999999"), 1, "longest request has"),
        (("--rate", "1", *SHAPE, "--gpu", "L4", "--gpus-per-replica", "3"), 2, "do not divide among 3"),
        (("--rate", "1", *SHAPE, "--gpu", "H100", "--slo-tpot", "1"), 1, "even an idle replica keeps only"),
        (("--rate", "1", *SHAPE, "--gpu", "H100", "--goal", "2"), 2, "goal must be"),
        (("--rate", "1e-9", *SHAPE, "--gpu", "H100"), 2, "fewer than two requests"),
        (
            ("--rate", "1", "--scale", "1e6", *SHAPE, "--gpu", "H100"),
            2,
            "scale: 1.97e+09 requests are more than",
        ),
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
    found = planned(capsys, *arguments)
    cut = found | {"best": "split", "colocated": None, "out_of_time": True}
    assert "the other kind was not seen to reach 95%" in plan_text(cut)
    assert "the other kind does not reach 95%" in plan_text(cut | {"out_of_time": False})
