"""Options, variables, help texts and docs/reference/configuration.md agree with the settings models."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from dev.docs import configuration_page
from engine.core import model_runner as core
from engine.kv_cache import memory as kv_pool
from launcher.cli import services, up
from launcher.cli.main import app, main
from splitserve.config.autoscaler import AutoscalerConfig
from splitserve.config.base import Settings, merge_settings, read_settings_file
from splitserve.config.cluster import ClusterConfig
from splitserve.config.command_line import (
    Setting,
    arguments,
    command,
    default_text,
    options_of,
    overrides,
    settings_of,
    variables_given,
)
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError, InvalidArgumentError

pytestmark = pytest.mark.timeout(60)

KINDS: dict[type[Settings], dict[str, Any]] = {
    WorkerConfig: {"worker_id": "w", "model": "m"},
    CoordinatorConfig: {},
    AutoscalerConfig: {"policy": "p.yaml"},
    ClusterConfig: {},
}
"""The settings of each command with their required values."""
ODD: dict[str, Any] = {
    "adapters": ["red=/adapters/red", "blue=b"],
    "device": "cuda:1",
    "advertise_address": "h:1",
    "allowed_origins": ["https://a.example", "http://b.example:8080"],
    "coordinators": ["a:1", "b:2"],
    "cpus": [0, 1, 2, 5],
    "gpus": ["0", "GPU-1"],
    "docker.gpus": "0,1;2,3",
    "endpoint": "https://collector:4317",
    "http_port": "off",
    "tokenizers": ["words", "more"],
    "model_routes": {"words": {"v1": 95, "v2": 4.123456789}, "more": {"v3": 1}},
    "circuit_breaker": {"enabled": False, "open_s": 0.25, "window_s": 4.5},
    "kubernetes.prefill": "statefulset/p",
    "kubernetes.decode": "deployment/d",
}
"""Test values by path or name, for settings whose type does not suggest one."""
CHANGEABLE = [(kind, setting) for kind in KINDS for setting in options_of(kind)]
IDS = [f"{kind.__name__}-{setting.path}" for kind, setting in CHANGEABLE]


def other(kind: type[Settings], setting: Setting) -> Any:
    """A value other than the default."""
    if kind is ClusterConfig and setting.name == "coordinators":
        return 3
    for name in (setting.path, setting.name):
        if name in ODD:
            return ODD[name]
    default = setting.field.get_default(call_default_factory=True)
    if setting.is_switch:
        return not default
    choices = setting.metavar.split("|")
    if len(choices) > 1:
        return next(choice for choice in choices if choice != default)
    annotation = str(setting.field.annotation)
    if "int" in annotation:
        return 2**17 + 8192 if setting.metavar == "BYTES" and "salt" not in setting.name else 7
    if "float" in annotation:
        return 1.4375 if setting.metavar == "SECONDS" else 0.4375
    return "x"


def nested(path: str, value: Any) -> dict[str, Any]:
    return overrides({path.replace(".", "__"): value})


def changed(kind: type[Settings], setting: Setting) -> Settings:
    """The command's settings with this one changed."""
    return merge_settings(kind, {}, KINDS[kind], nested(setting.path, other(kind, setting)))


def parsed(kind: type[Settings], given: list[str]) -> Settings:
    """The settings that a command parses from a command line."""
    found: list[Settings] = []
    program = typer.Typer(add_completion=False)
    program.command()(command(kind, found.append))
    program(args=given, standalone_mode=False)
    return found[0]


@pytest.mark.parametrize(("kind", "setting"), CHANGEABLE, ids=IDS)
def test_each_setting_passes_through_the_command_line(kind: type[Settings], setting: Setting) -> None:
    settings = changed(kind, setting)
    base = merge_settings(kind, {}, KINDS[kind])
    if setting.path not in KINDS[kind]:
        assert settings != base
        assert len(arguments(settings)) > len(arguments(base))
    assert parsed(kind, arguments(settings)) == settings


@pytest.mark.parametrize(("kind", "setting"), CHANGEABLE, ids=IDS)
def test_each_setting_comes_from_its_variable(kind: type[Settings], setting: Setting) -> None:
    settings = changed(kind, setting)
    given = arguments(settings)
    texts = [text for flag, text in pairwise(given) if flag == setting.flag]
    if setting.is_switch:
        texts = [str(other(kind, setting)).lower()]
    assert texts
    environment = {setting.variable: " ".join(texts), "SPLITSERVE_TARGET": "elsewhere:1"}
    assert merge_settings(kind, {}, KINDS[kind], variables_given(kind, environment)) == settings


@pytest.mark.parametrize("kind", KINDS)
def test_all_settings_at_once(kind: type[Settings]) -> None:
    mine = [setting for owner, setting in CHANGEABLE if owner is kind]
    settings = merge_settings(
        kind, {}, KINDS[kind], *(nested(setting.path, other(kind, setting)) for setting in mine)
    )
    assert parsed(kind, arguments(settings)) == settings
    assert arguments(merge_settings(kind, {}, KINDS[kind])) == [
        text for name, value in KINDS[kind].items() for text in (f"--{name.replace('_', '-')}", value)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_flags_and_variables_are_unique(kind: type[Settings]) -> None:
    mine = [setting for owner, setting in CHANGEABLE if owner is kind]
    assert len({setting.flag for setting in mine}) == len(mine)
    every = list(settings_of(kind))
    assert len({setting.variable for setting in every}) == len(every)
    taken = {"SPLITSERVE_TARGET", "SPLITSERVE_API_KEY", "SPLITSERVE_TLS", "SPLITSERVE_CLUSTER_TOKEN"}
    taken |= {"SPLITSERVE_HOME", "SPLITSERVE_LOG_LEVEL", "SPLITSERVE_LOG_FORMAT"}
    assert not {setting.variable for setting in every} & taken


@pytest.mark.parametrize(("kind", "setting"), CHANGEABLE, ids=IDS)
def test_help_texts_tell_the_models_defaults(kind: type[Settings], setting: Setting) -> None:
    default = setting.field.get_default(call_default_factory=True)
    about = setting.help
    assert about
    # Square brackets would be interpreted as markup.
    assert "[" not in about
    assert "\n" not in about
    if (
        default is None
        or default in ("", (), {})
        or setting.field.is_required()
        or "NAME=VALUE" in setting.metavar
    ):
        assert about.count("Default:") <= 1
        return
    assert "Default:" not in (setting.field.description or ""), "the model tells its default itself"
    told = about.removesuffix(f" Variable: {setting.variable}.").partition("Default: ")[2].removesuffix(".")
    base = merge_settings(kind, {}, KINDS[kind])
    value = told.split() if setting.is_repeated else told
    assert merge_settings(kind, {}, KINDS[kind], nested(setting.path, value)) == base


def test_defaults_that_depend_on_the_machine_are_those_of_the_engine() -> None:
    fields = EngineConfig.model_fields
    on_cpu, on_cuda = core.DEFAULT_STEP_TOKENS["DRAM"], core.DEFAULT_STEP_TOKENS["VRAM"]
    told = default_text(fields["max_step_tokens"])
    assert told == f"Default: {on_cpu} on cpu, {on_cuda} on cuda."
    gibibytes = kv_pool.DEFAULT_BYTES / 2**30
    told = default_text(fields["kv_memory_bytes"])
    assert told == f"Default: {gibibytes:g} GiB on cpu; on cuda what `device_memory_share` leaves."


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("coordinator", CoordinatorConfig),
        ("prefill-worker", WorkerConfig),
        ("decode-worker", WorkerConfig),
        ("worker", WorkerConfig),
        ("autoscaler", AutoscalerConfig),
        ("up", ClusterConfig),
    ],
)
def test_a_command_shows_its_settings(
    name: str, kind: type[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    basic = capsys.readouterr().out
    assert main([name, "--help-all"]) == 0
    whole = capsys.readouterr().out
    # Each option's text is wrapped in a column, so white space is left out.
    texts = ["".join(part.split()) for part in re.split(r"^  (?=-)", whole, flags=re.MULTILINE)]
    for setting in (setting for owner, setting in CHANGEABLE if owner is kind):
        beginning = rf"^  {setting.flag}(?= )"
        assert bool(re.search(beginning, basic, re.MULTILINE)) == (setting.option.tier == "basic")
        assert bool(re.search(beginning, whole, re.MULTILINE)) == (setting.option.tier != "internal")
        if setting.option.tier != "internal":
            metavar = "" if setting.is_switch else setting.metavar
            begins, says = f"{setting.flag}{metavar}".replace(" ", ""), "".join(setting.help.split())
            assert any(text.startswith(begins) and says in text for text in texts), setting.flag


def test_the_basic_settings_of_a_cluster_are_one_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert main(["up", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("option", "variable", "file", "expected"),
    [
        ("4", "3", 2, 4),
        (None, "3", 2, 3),
        (None, None, 2, 2),
        (None, "", 2, 2),
        (None, "tcp://10.0.0.1:80", 2, 2),
        (None, None, None, 16),
        ("4", None, None, 4),
    ],
)
def test_precedence(
    option: str | None,
    variable: str | None,
    file: int | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["--worker-id", "w", "--model", "m"]
    if file is not None:
        path = tmp_path / "worker.yaml"
        path.write_text(json.dumps({"engine": {"block_size_tokens": file, "threads": 5}}))
        given += ["--config", str(path)]
    if variable is not None:
        monkeypatch.setenv("SPLITSERVE_ENGINE_BLOCK_SIZE_TOKENS", variable)
    if option is not None:
        given += ["--block-size", option]
    found = parsed(WorkerConfig, given)
    assert isinstance(found, WorkerConfig)
    assert found.engine.block_size_tokens == expected
    assert found.engine.threads == (None if file is None else 5)


def test_a_worker_has_a_name_unless_one_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[WorkerConfig] = []
    monkeypatch.setattr(services, "_run_worker", started.append)
    path = tmp_path / "worker.yaml"
    path.write_text(json.dumps({"worker_id": "named", "model": "m", "coordinators": ["a:1"]}))
    app(args=["decode-worker", "--model", "m"], standalone_mode=False)
    app(args=["decode-worker", "--config", str(path), "--model", "other"], standalone_mode=False)
    monkeypatch.setenv("SPLITSERVE_WORKER_ID", "varied")
    app(args=["prefill-worker", "--config", str(path)], standalone_mode=False)
    app(args=["prefill-worker", "--config", str(path), "--worker-id", "told"], standalone_mode=False)
    ids = [settings.worker_id for settings in started]
    assert re.fullmatch(rf"decode-.+-{os.getpid()}", ids[0])
    assert ids[1:] == ["named", "varied", "told"]
    assert [settings.role for settings in started] == ["decode", "decode", "prefill", "prefill"]
    assert started[1].model == "other"
    assert started[1].coordinators == ("a:1",)


def test_up_takes_the_parts_variables_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children get options, which omit defaults: a variable must not override those defaults."""
    started: list[ClusterConfig] = []

    async def run_cluster(settings: ClusterConfig, log_dir: Path | None) -> bool:
        started.append(settings)
        assert log_dir == Path("logs")
        return False

    monkeypatch.setattr(up, "run_cluster", run_cluster)
    monkeypatch.setenv("SPLITSERVE_ENGINE_DTYPE", "float32")
    monkeypatch.setenv("SPLITSERVE_PORT", "5")
    monkeypatch.setenv("SPLITSERVE_COORDINATOR_LONG_PROMPT_TOKENS", "3")
    monkeypatch.setenv("SPLITSERVE_TLS", "of-clients")
    options = ["--engine", "simulated", "--model", "simulated", "--grpc-port", "0", "--http-port", "off"]
    app(args=["up", *options, "--dtype", "auto", "--log-dir", "logs"], standalone_mode=False)
    (settings,) = started
    assert settings.engine.dtype == "auto"
    assert settings.coordinator.long_prompt_tokens == 3
    assert settings.tls is None
    assert "SPLITSERVE_ENGINE_DTYPE" not in os.environ
    assert "SPLITSERVE_PORT" not in os.environ
    assert os.environ["SPLITSERVE_TLS"] == "of-clients"


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (CoordinatorConfig, {"grpc_port": "x"}, "grpc_port: Input should be a valid integer"),
        (CoordinatorConfig, {"http_port": "on"}, "http_port: "),
        (CoordinatorConfig, {"model_routes": ["a"]}, "a route is written NAME=MODEL"),
        (CoordinatorConfig, {"circuit_breaker": "enabled"}, "it is written NAME=VALUE"),
        (WorkerConfig, {"cpus": "0-"}, "cpus must look like"),
        (WorkerConfig, {"coordinators": ["host"]}, "coordinator must be"),
        (AutoscalerConfig, {"coordinators": ["host:0"]}, "coordinator must be"),
    ],
)
def test_wrong_texts(kind: type[Settings], given: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, InvalidArgumentError), match=re.escape(message)):
        merge_settings(kind, {**KINDS[kind], **given})


def test_a_file_may_hold_the_texts_of_options_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.yaml"
    path.write_text("http_port: 'off'\nmodel_routes: [words=a:1]\n")
    found = merge_settings(CoordinatorConfig, read_settings_file(path))
    assert found.http_port is None
    assert found.model_routes == {"words": {"a": 1.0}}
    path.write_text("http_port: null\n")
    assert merge_settings(CoordinatorConfig, read_settings_file(path)).http_port is None


def test_the_page_is_current_and_names_each_option_and_variable() -> None:
    page = configuration_page.page()
    assert configuration_page.PAGE.read_text(encoding="utf-8") == page
    for kind, setting in CHANGEABLE:
        if setting.option.tier == "internal":
            continue
        row = next((line for line in page.splitlines() if line.startswith(f"| `{setting.name}`")), None)
        assert row is not None, setting.path
        assert f"`{setting.flag}`" in page
        if kind is not ClusterConfig:
            assert f"`{setting.variable}`" in page


def test_every_kind_of_value_has_a_metavar() -> None:
    known = {"INTEGER", "NUMBER", "BYTES", "SECONDS", "FILE", "DIR", "TEXT"}
    plain = {s.metavar for _, s in CHANGEABLE if s.option.metavar is None and not s.is_switch}
    assert {metavar for metavar in plain if "|" not in metavar} <= known
