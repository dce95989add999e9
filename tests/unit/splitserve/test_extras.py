"""What a command needs beyond the base is named before anything starts, in one line that says how to install it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.main import main
from splitserve import extras
from splitserve.errors import MissingExtraError
from splitserve.models import fetch, tokenizer_cache
from splitserve.models.sources import ModelSource


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation of the base alone, and an empty cache."""
    for module in (extras, tokenizer_cache):
        monkeypatch.setattr(module, "installed", lambda name: False)
    monkeypatch.setenv("SPLITSERVE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("demo", "cpu"),
        ("up", "cpu"),
        ("up --engine vllm", "vllm"),
        ("up --engine simulated", "cpu"),
        ("worker --model m", "cpu"),
        ("decode-worker --model m --engine vllm", "vllm"),
        ("model fetch smollm2-135m-instruct", "cpu"),
    ],
)
def test_a_command_says_what_to_install(
    base: None, capsys: pytest.CaptureFixture[str], command: str, extra: str
) -> None:
    assert main(command.split()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(f"pip install 'splitserve[{extra}]'")


def test_with_another_transport_a_simulated_worker_needs_nothing(base: None) -> None:
    extras.require_worker("simulated", "ucx")


def test_a_fetched_model_needs_nothing_more(base: None, tmp_path: Path) -> None:
    (tmp_path / "models" / "smollm2-135m-instruct").mkdir(parents=True)
    fetch.fetch_model("smollm2-135m-instruct", lambda *_: None)


def test_what_stands_in_for_a_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "no_such_module", object())
    assert extras.installed("no_such_module")
    assert not extras.installed("no_such_module_either")


def test_a_coordinator_without_transformers_reads_what_workers_have_converted(
    monkeypatch: pytest.MonkeyPatch, base: None, tmp_path: Path
) -> None:
    (folder := tmp_path / "model").mkdir()
    (folder / "vocab.json").write_text("{}")
    source = ModelSource(str(folder), None, "model")
    with pytest.raises(MissingExtraError, match="the tokenizer of model"):
        tokenizer_cache.converted_tokenizer(source)
    monkeypatch.setattr(tokenizer_cache, "read_tokenizer", lambda path: path)
    converted = tmp_path / "tokenizers" / f"{tokenizer_cache._key(source)}-5.0.0"
    converted.mkdir(parents=True)
    assert str(tokenizer_cache.converted_tokenizer(source)) == str(converted)
