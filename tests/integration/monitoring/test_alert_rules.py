"""Each alert fires on series that are bad and on none that are good; each has a section in
docs/guides/operations.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.monitoring.prometheus import MONITORING, RULES, binaries
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

OPERATIONS = Path(__file__).parents[3] / "docs/guides/operations.md"
Series = dict[str, str]
"""Values, one a minute, by series; in promtool's notation."""
UP = 'up{job="coordinator"}'
BASE: Series = {UP: "1x90"}
ENDED = "splitserve_requests_ended_total"
TTFT = "splitserve_time_to_first_token_seconds"
LAG = "splitserve_event_loop_lag_seconds_bucket"
AUTOSCALER = "splitserve_autoscaler"
CASES: dict[str, tuple[Series, Series]] = {
    "SplitserveErrorBudgetBurnsFast": (
        {f'{ENDED}{{outcome="completed"}}': "0+98x90", f'{ENDED}{{outcome="failed"}}': "0+2x90"},
        {f'{ENDED}{{outcome="completed"}}': "0+100x90", f'{ENDED}{{outcome="rejected"}}': "0+4x90"},
    ),
    "SplitserveErrorBudgetBurnsSlowly": (
        {f'{ENDED}{{outcome="completed"}}': "0+990x90", f'{ENDED}{{outcome="timed_out"}}': "0+10x90"},
        {f'{ENDED}{{outcome="completed"}}': "0+999x90", f'{ENDED}{{outcome="timed_out"}}': "0+1x90"},
    ),
    "SplitserveTtftBudgetBurnsFast": (
        {f'{TTFT}_bucket{{le="1.90609"}}': "0+10x90", f"{TTFT}_count": "0+100x90"},
        {f'{TTFT}_bucket{{le="1.90609"}}': "0+90x90", f"{TTFT}_count": "0+100x90"},
    ),
    "SplitserveTtftBudgetBurnsSlowly": (
        {f'{TTFT}_bucket{{le="1.90609"}}': "0+50x90", f"{TTFT}_count": "0+100x90"},
        {f'{TTFT}_bucket{{le="1.90609"}}': "0+95x90", f"{TTFT}_count": "0+100x90"},
    ),
    "SplitserveNoCoordinator": ({UP: "1x40 0x50"}, {'up{job="decode"}': "0x90"}),
    "SplitservePoolEmpty": (
        {
            'splitserve_ready_workers{pool="decode"}': "2x90",
            'splitserve_ready_workers{pool="prefill"}': "1x30 0x60",
        },
        {
            'splitserve_ready_workers{pool="decode"}': "0x90",
            f'{AUTOSCALER}_desired_replicas{{pool="decode"}}': "0x90",
            'splitserve_ready_workers{pool="prefill"}': "1x90",
        },
    ),
    "SplitserveRequestsRefused": (
        {f'{ENDED}{{outcome="completed"}}': "0+90x90", f'{ENDED}{{outcome="rejected"}}': "0+10x90"},
        {f'{ENDED}{{outcome="completed"}}': "0+99x90", f'{ENDED}{{outcome="rejected"}}': "0+1x90"},
    ),
    "SplitserveEventLoopLate": (
        {
            f'{LAG}{{instance="a", le="0.1"}}': "0x90",
            f'{LAG}{{instance="a", le="0.5"}}': "0+9x90",
            f'{LAG}{{instance="a", le="+Inf"}}': "0+9x90",
        },
        {
            f'{LAG}{{instance="a", le="0.1"}}': "0+9x90",
            f'{LAG}{{instance="a", le="0.5"}}': "0+9x90",
            f'{LAG}{{instance="a", le="+Inf"}}': "0+9x90",
        },
    ),
    "SplitserveFileRejected": (
        {'splitserve_file_rejected{file="policy"}': "1x90"},
        {'splitserve_file_rejected{file="policy"}': "1x50 0x40"},
    ),
    "SplitserveLoopFailed": (
        {'splitserve_loop_failures_total{loop="expiry"}': "0x52 1x38"},
        {'splitserve_loop_failures_total{loop="expiry"}': "0x20 1x70"},
    ),
    "SplitserveUnknownKeys": (
        {"splitserve_unauthenticated_calls_total": "0+120x90"},
        {"splitserve_unauthenticated_calls_total": "0+6x90"},
    ),
    "SplitserveWorkersKeepStarting": (
        {'splitserve_replicas{role="decode", state="starting"}': "1x90"},
        {'splitserve_replicas{role="decode", state="starting"}': "1x50 0x40"},
    ),
    "SplitserveWorkerNotRegistered": (
        {'splitserve_registered{coordinator="a:1"}': "0x90"},
        {'splitserve_registered{coordinator="a:1"}': "0x50 1x40"},
    ),
    "SplitserveDecodeKvFull": (
        {'splitserve_decode_kv_usage_ratio{model="m"}': "0.97x90"},
        {'splitserve_decode_kv_usage_ratio{model="m"}': "0.9x90"},
    ),
    "SplitserveBlocksQuarantined": (
        {'splitserve_kv_blocks{state="quarantined"}': "4x90"},
        {
            'splitserve_kv_blocks{state="quarantined"}': "4x55 0x35",
            'splitserve_kv_blocks{state="free"}': "9x90",
        },
    ),
    "SplitserveCircuitOpen": (
        {'splitserve_circuits{kind="pair", state="open"}': "1x90"},
        {'splitserve_circuits{kind="pair", state="half-open"}': "1x90"},
    ),
    "SplitserveAnswersWrong": (
        {'splitserve_canary_wrong_pairs{model="m"}': "1x90"},
        {'splitserve_canary_wrong_pairs{model="m"}': "0x90"},
    ),
    "SplitserveGpuHot": (
        {'splitserve_gpu_temperature_celsius{gpu="0"}': "90x90"},
        {'splitserve_gpu_temperature_celsius{gpu="0"}': "70x90"},
    ),
    "SplitserveHandoffsFail": (
        {
            'splitserve_handoffs_total{lane="rdma", outcome="failed"}': "0+2x90",
            'splitserve_handoffs_total{lane="rdma", outcome="completed"}': "0+98x90",
        },
        {
            'splitserve_handoffs_total{lane="rdma", outcome="failed"}': "0x90",
            'splitserve_handoffs_total{lane="rdma", outcome="completed"}': "0+98x90",
        },
    ),
    "SplitserveLaneSlow": ({"splitserve_kv_slow_lanes": "1x90"}, {"splitserve_kv_slow_lanes": "0x90"}),
    "SplitserveNoAutoscalerActs": (
        {f'{AUTOSCALER}_holds_lease{{instance="{name}"}}': "0x90" for name in "ab"},
        {
            f'{AUTOSCALER}_holds_lease{{instance="a"}}': "0x90",
            f'{AUTOSCALER}_holds_lease{{instance="b"}}': "1x90",
        },
    ),
    "SplitserveAutoscalerErrors": (
        {f'{AUTOSCALER}_errors_total{{hop="start"}}': "0+2x90"},
        {f'{AUTOSCALER}_errors_total{{hop="start"}}': "0x30 2x60"},
    ),
    "SplitserveStartsFail": (
        {
            f'{AUTOSCALER}_start_pause_seconds{{pool="decode"}}': "30x90",
            f'{AUTOSCALER}_failed_starts_total{{pool="decode"}}': "0+1x90",
        },
        {
            f'{AUTOSCALER}_start_pause_seconds{{pool="decode"}}': "0x90",
            f'{AUTOSCALER}_failed_starts_total{{pool="decode"}}': "0x30 1x60",
        },
    ),
    "SplitserveReplicasOverdue": (
        {f'{AUTOSCALER}_replicas{{pool="decode", state="overdue"}}': "1x90"},
        {f'{AUTOSCALER}_replicas{{pool="decode", state="starting"}}': "1x90"},
    ),
    "SplitservePoolTooSmall": (
        {
            f'{AUTOSCALER}_desired_replicas{{pool="decode"}}': "3x90",
            f'{AUTOSCALER}_replicas{{pool="decode", state="ready"}}': "1x90",
        },
        {
            f'{AUTOSCALER}_desired_replicas{{pool="decode"}}': "3x90",
            f'{AUTOSCALER}_replicas{{pool="decode", state="ready"}}': "1x50 3x40",
        },
    ),
    "SplitserveGpuBudgetReached": (
        {f'{AUTOSCALER}_reason{{pool="decode", reason="gpu_budget"}}': "1x90"},
        {f'{AUTOSCALER}_reason{{pool="decode", reason="policy"}}': "1x90"},
    ),
}


def alerts() -> dict[str, dict[str, Any]]:
    """The alerts by name."""
    groups = yaml.safe_load((MONITORING / "rules/alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_each_alert_is_tried() -> None:
    assert alerts().keys() == CASES.keys()


def test_each_alert_has_a_section_and_a_severity() -> None:
    sections = set(re.findall(r"^### (Splitserve\w+)$", OPERATIONS.read_text(), re.MULTILINE))
    assert sections == alerts().keys()
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook"] == f"docs/guides/operations.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_the_profile_mounts_the_rules() -> None:
    services = yaml.safe_load((MONITORING.parent / "compose.yaml").read_text())["services"]
    mounted = dict(volume.split(":")[:2] for volume in services["prometheus"]["volumes"])
    assert mounted["./monitoring/prometheus.yaml"] == "/etc/prometheus/prometheus.yml"
    assert mounted["./monitoring/rules"] == "/etc/prometheus/rules"
    named = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["rule_files"]
    assert named == ["rules/*.yaml"]
    assert RULES


def told(series: Series, query: str, value: int) -> dict[str, Any]:
    """A test for promtool: what a query over these series gives after an hour."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in (BASE | series).items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": "60m", "exp_samples": [{"labels": "{}", "value": value}]}
        ],
    }


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_when_it_should(name: str, tmp_path: Path) -> None:
    bad, good = CASES[name]
    tests = [
        told(bad, f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) > bool 0', 1),
        told(good, 'count(ALERTS{alertstate="firing"}) or vector(0)', 0),
    ]
    content = {"rule_files": list(RULES), "evaluation_interval": "1m", "tests": tests}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(content))
    command = [str(binaries() / "promtool"), "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
