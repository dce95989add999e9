"""`splitserve autoscaler explain`: plain text, JSON, and what it says where nobody answers as it expects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from autoscaler.decisions import DECISIONS_PATH, DecisionJournal, decisions_of
from autoscaler.plan import PoolPlan, ScalingPlan
from launcher.cli.client.scaling_explain import PATH
from launcher.cli.main import main
from splitserve.metrics_server import MetricsServer
from splitserve.security.certificates import write_certificates
from splitserve.security.tls import ServerTls, files_in
from tests.support.scaling.snapshots import snapshot

TOKEN = "a-token-of-a-cluster"
PLAN = ScalingPlan(
    PoolPlan(3, 1, "3 carry what may arrive", cause="gpu_budget"), PoolPlan(4, reason="4 needed")
)


def page() -> dict[str, Any]:
    journal = DecisionJournal()
    decided = decisions_of(PLAN, {"prefill": (), "decode": ()}, ())
    for now_s in (1800.0, 1861.0):
        journal.enter(snapshot(now_s), decided, acted=now_s > 1800)
    return journal.document()


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry(), None, {DECISIONS_PATH: page}, TOKEN)
    yield server
    server.close()


@pytest.fixture
def token(tmp_path: Path) -> list[str]:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return ["--cluster-token-file", str(path)]


def explain(server: MetricsServer, *options: str) -> int:
    return main(["autoscaler", "explain", "--target", f"127.0.0.1:{server.server_port}", *options])


def test_text(server: MetricsServer, token: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert PATH == DECISIONS_PATH
    assert explain(server, *token) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text, "it is piped"
    assert text.startswith("decision 2 ")
    assert "decision 1  1970-01-01T00:00:00.000+00:00  (not acted on)" in text
    assert "    bound by gpu_budget: 3 carry what may arrive\n" in text
    assert "wants 3 + 1 standby\n" in text


def test_json_of_the_last_one(
    server: MetricsServer, token: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(server, *token, "--json", "--last", "1") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["number"] for one in found["decisions"]] == [2]


def test_the_token_is_needed(server: MetricsServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(server) == 1
    assert "the cluster token is needed (--cluster-token-file)" in capsys.readouterr().err


def test_what_is_no_autoscaler(capsys: pytest.CaptureFixture[str]) -> None:
    other = MetricsServer("127.0.0.1", 0, CollectorRegistry())
    try:
        assert explain(other) == 1
    finally:
        other.close()
    assert explain(other) == 1
    assert main(["autoscaler", "explain", "--target", "nowhere"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "not an autoscaler's metrics endpoint" in errors[0]
    assert "no answer of an autoscaler" in errors[1]
    assert "target must be HOST:PORT" in errors[2]


def test_mutual_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_certificates(tmp_path, ["127.0.0.1"], 1)
    context = ServerTls(files_in(tmp_path, "autoscaler")).ssl_context(mutual=True)
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry(), context, {DECISIONS_PATH: page})
    try:
        assert explain(server, "--tls", str(tmp_path)) == 0
        assert "decision 2" in capsys.readouterr().out
        assert explain(server, "--tls", str(tmp_path / "ca.pem")) == 1, "without a certificate of its own"
    finally:
        server.close()
