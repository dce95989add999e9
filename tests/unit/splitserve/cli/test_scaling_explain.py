"""`splitserve autoscaler explain`: plain text, JSON, and what it says where nobody answers as it expects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from autoscaler.decisions.attainment import AttainmentModel
from autoscaler.decisions.decisions_page import DECISIONS_PATH, decisions_document, shared_document
from autoscaler.decisions.journal import DecisionJournal
from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.reconcile import ReplicaView
from autoscaler.snapshot import ReplicaState
from splitserve.cli.client.scaling_explain import PATH, _replay_lines
from splitserve.cli.main import main
from splitserve.metrics_server import MetricsServer
from splitserve.security.certificates import write_certificates
from splitserve.security.server_tls import ServerTls
from splitserve.security.tls import files_in
from tests.support.scaling.snapshots import snapshot

TOKEN = "a-token-of-a-cluster"
PLAN = ScalingPlan(
    PoolPlan(3, 1, "3 carry what may arrive", cause="gpu_budget"), PoolPlan(4, reason="4 needed")
)


def replay(model: str, role: str) -> dict[str, Any]:
    told = {"policy": f"{model}-{role}", "role": role, "length_s": 600.0, "requests": 10, "attainment": 0.5}
    return {"model": model, **told, "replica_hours": 1.0, "gpu_hours": 2.0}


def test_scores_are_told_by_model() -> None:
    lines = list(_replay_lines([replay("a", "in_force"), replay("a", "shadow"), replay("b", "in_force")]))
    titles = [line for line in lines if line.startswith("had these policies decided")]
    assert [title.split("  ")[0] for title in titles] == [
        "had these policies decided for a",
        "had these policies decided for b",
    ]
    assert "what the others leave" in titles[0]
    assert sum("within both targets" in line for line in lines) == 3
    told = shared_document({}, {}, {}, {"a": [{"policy": "x"}], "b": []})
    assert told["replays"] == [{"model": "a", "policy": "x"}]


def page() -> dict[str, Any]:
    rules = parse_policy(
        {"prefill": {"target_ms": 500}, "decode": {"kind": "target", "metric": "tpot", "target": 9}}
    )
    journal = DecisionJournal(AttainmentModel(rules))
    for now_s in (1800.0, 1861.0):
        journal.enter(snapshot(now_s), PLAN, {"prefill": (), "decode": ()}, (), acted=now_s > 1800)
    return decisions_document(journal.decisions)


def test_the_bill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = {"name": "slow", "price_per_hour": 1.25}
    classes = [slow, {"name": "fast", "price_per_hour": 4, "speed": 4}]
    rules = parse_policy({pool: {"target_ms": 500, "classes": classes} for pool in ("prefill", "decode")})
    journal = DecisionJournal(AttainmentModel(rules))
    mix = (ClassShare("slow", 2, 1, 1.25, standby=1), ClassShare("fast", 0, 4, 4, gpus=2))
    plan = ScalingPlan(PoolPlan(2, units=2, mix=mix), PoolPlan(1))
    there = ReplicaView("p0", ReplicaState.READY, 0, 0, replica_class="slow")
    journal.enter(snapshot(), plan, {"prefill": (there,), "decode": ()}, (), acted=True)
    server = MetricsServer(
        "127.0.0.1",
        0,
        CollectorRegistry(),
        None,
        {DECISIONS_PATH: lambda: decisions_document(journal.decisions)},
        None,
    )
    try:
        assert explain(server) == 0
    finally:
        server.close()
    text = capsys.readouterr().out
    assert (
        "    bill: 3.75 an hour: 2 slow at 1.25 + 1 on standby (of 1) + 0 fast at 4 (of 0); now 1.25\n"
        in text
    )
    assert "    GPUs: 3 wanted, now 1 (slow 1, fast 2 a replica)\n" in text
    assert "    one unit more costs 1.25 an hour, one less saves 1.25\n" in text
    assert "with 3 units" in text
    assert text.count("bill:") == 1, "decode has no prices"


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
    assert "with 2, " in text
    assert "with 4\n" in text
    assert "achieved: 100.0% (100 samples, 4 ready, 61 s after it)" in text
    assert "achieved: not known before 60 s after it" in text
    assert "no latency target: nothing to predict" in text


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


def test_several_models_and_what_they_share(capsys: pytest.CaptureFixture[str]) -> None:
    journals = {model: DecisionJournal() for model in ("a", "b")}
    for journal in journals.values():
        journal.enter(snapshot(), PLAN, {"prefill": (), "decode": ()}, (), acted=True)
    document = shared_document(
        {model: journal.decisions for model, journal in journals.items()},
        {"money": 9.0},
        {"a": {"money": 6.0}, "b": {"money": 2.0}},
    )
    server = MetricsServer(
        "127.0.0.1", 0, CollectorRegistry(), None, {DECISIONS_PATH: lambda: document}, None
    )
    try:
        target = f"127.0.0.1:{server.server_port}"
        assert main(["autoscaler", "explain", "--target", target]) == 0
        everything = capsys.readouterr().out
        assert main(["autoscaler", "explain", "--target", target, "--model", "b"]) == 0
        of_b = capsys.readouterr().out
    finally:
        server.close()
    assert everything.startswith("all models together: 8 of 9 money (a has 6, b 2)\n")
    assert ["decision 1 for a" in text for text in (everything, of_b)] == [True, False]
    assert ["decision 1 for b" in text for text in (everything, of_b)] == [True, True]
