"""A setting that has no effect beside the others is told of, and is no error: files and variables are shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitserve.config.base import merge_settings
from splitserve.config.cluster import ClusterConfig
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError

NAMED = {"worker_id": "a", "model": "simulated"}
URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("given", "others", "field"),
    [
        ({"cluster_port": 0}, {"tls": {"directory": Path("certs")}}, "cluster_port"),
        ({"page_token_file": Path("a"), "page": "off"}, {"page": "on"}, "page_token_file"),
        ({"page_token_file": Path("a"), "http_port": "off"}, {"http_port": 0}, "page_token_file"),
        (
            {"tracing": {"authority": Path("a"), "endpoint": "http://a:1"}},
            {"tracing": {"endpoint": "https://a:1"}},
            "tracing.authority",
        ),
    ],
)
def test_of_a_coordinator(given: dict[str, Any], others: dict[str, Any], field: str) -> None:
    (told,) = CoordinatorConfig.model_validate(given).idle_settings().items()
    assert told[0] == field
    assert told[1].startswith("without ")
    assert not merge_settings(CoordinatorConfig, _merged(given, others)).idle_settings()


@pytest.mark.parametrize(
    ("given", "others", "field"),
    [({"tracing": {"authority": Path("a")}}, {"tracing": {"endpoint": "https://a:1"}}, "tracing.authority")],
)
def test_of_a_worker(given: dict[str, Any], others: dict[str, Any], field: str) -> None:
    (told,) = merge_settings(WorkerConfig, {**NAMED, **given}).idle_settings().items()
    assert told[0] == field
    assert told[1].startswith("without ")
    assert not merge_settings(WorkerConfig, {**NAMED, **_merged(given, others)}).idle_settings()


@pytest.mark.parametrize(
    ("given", "others", "field"),
    [
        ({"autoscale_window_s": 60.0}, {"autoscale": Path("policy")}, "autoscale_window_s"),
        ({"worker_gpus": 1}, {"workers": 2}, "worker_gpus"),
        ({"prefill_gpus": 1, "workers": 2}, {"workers": None}, "prefill_gpus"),
        ({"decode_gpus": 1, "workers": 2}, {"workers": None}, "decode_gpus"),
        ({"prefill_gpus": 3, "autoscale": Path("policy")}, {"autoscale": None}, "prefill_gpus"),
    ],
)
def test_of_a_local_cluster(given: dict[str, Any], others: dict[str, Any], field: str) -> None:
    assert list(ClusterConfig.model_validate(given).idle_settings()) == [field]
    assert not ClusterConfig.model_validate(given | others).idle_settings()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tls": {"directory": Path("certs")}}, "coordinator.tls"),
        ({"cluster_token_file": Path("a")}, "coordinator.cluster_token_file"),
    ],
)
def test_security_of_a_local_cluster_in_the_wrong_place_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: has no effect in a local cluster") as caught:
        ClusterConfig.model_validate({"coordinator": given}).check_own_security()
    assert caught.value.field == field


def test_defaults_are_never_idle() -> None:
    assert not CoordinatorConfig().idle_settings()
    assert not ClusterConfig().idle_settings()
    assert not ClusterConfig(workers=2).idle_settings()
    ClusterConfig().check_own_security()


def _merged(given: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """`others` on top, section by section."""
    sections = {
        name: given[name] | value
        for name, value in others.items()
        if isinstance(value, dict) and isinstance(given.get(name), dict)
    }
    return given | others | sections
