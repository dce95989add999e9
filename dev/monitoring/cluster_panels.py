"""Panels of lanes, autoscaler and tenants."""

from __future__ import annotations

from dev.monitoring.panels import Dashboard, Panel, phase

LANES = Dashboard(
    "splitserve-lanes",
    "splitserve: lanes and handoffs",
    (
        Panel(
            "Handoffs by lane and outcome",
            "ops",
            {"{{lane}} {{outcome}}": "sum by (lane, outcome) (rate(splitserve_handoffs_total[1m]))"},
        ),
        Panel(
            "Handoffs that failed or were refused",
            "ops",
            {"{{job}} {{reason}}": "sum by (job, reason) (rate(splitserve_handoffs_rejected_total[1m]))"},
        ),
        Panel("KV written", "Bps", {"bytes": "sum(rate(splitserve_kv_sent_bytes_total[1m]))"}),
        Panel(
            "Transfer, and the first decode step after it (p95)",
            "s",
            {name: phase(name) for name in ("transfer", "decode_admit")},
        ),
        Panel(
            "Lanes at first contact, GB/s",
            "short",
            {
                "slowest": 'min(splitserve_kv_lane_gigabytes_per_second{stat="min"})',
                "median": 'avg(splitserve_kv_lane_gigabytes_per_second{stat="median"})',
            },
        ),
        Panel("Slow lanes", "short", {"lanes": "max(splitserve_kv_slow_lanes)"}),
        Panel(
            "Circuit breakers that are not closed",
            "short",
            {"{{kind}} {{state}}": "max by (kind, state) (splitserve_circuits)"},
        ),
    ),
)

AUTOSCALER = Dashboard(
    "splitserve-autoscaler",
    "splitserve: autoscaler",
    (
        Panel(
            "Prefill: wanted, ready, pending",
            "short",
            {
                "wanted": 'max(splitserve_autoscaler_desired_replicas{pool="prefill"})',
                "ready": 'max(splitserve_autoscaler_replicas{pool="prefill", state="ready"})',
                "pending": 'max(splitserve_autoscaler_replicas{pool="prefill", state="starting"})',
            },
        ),
        Panel(
            "Decode: wanted, ready, pending",
            "short",
            {
                "wanted": 'max(splitserve_autoscaler_desired_replicas{pool="decode"})',
                "ready": 'max(splitserve_autoscaler_replicas{pool="decode", state="ready"})',
                "pending": 'max(splitserve_autoscaler_replicas{pool="decode", state="starting"})',
            },
        ),
        Panel(
            "What decided the number wanted",
            "short",
            {"{{pool}} {{reason}}": "max by (pool, reason) (splitserve_autoscaler_reason) == 1"},
        ),
        Panel(
            "Actions, a minute",
            "short",
            {"{{action}}": "sum by (action) (increase(splitserve_autoscaler_actions_total[1m]))"},
        ),
        Panel(
            "What failed and is tried again, a minute",
            "short",
            {"{{hop}}": "sum by (hop) (increase(splitserve_autoscaler_errors_total[1m]))"},
        ),
        Panel(
            "Failed starts, and the pause after them",
            "short",
            {
                "{{pool}}: failed": "max by (pool) (splitserve_autoscaler_failed_starts_total)",
                "{{pool}}: pause, s": "max by (pool) (splitserve_autoscaler_start_pause_seconds)",
            },
        ),
        Panel(
            "Who acts",
            "short",
            {
                "acting autoscalers": "sum(splitserve_autoscaler_holds_lease)",
                "policy is current": "min(splitserve_autoscaler_policy_current)",
            },
        ),
    ),
)

TENANTS = Dashboard(
    "splitserve-tenants",
    "splitserve: tenants",
    (
        Panel(
            "Requests by tenant and outcome",
            "reqps",
            {
                "{{tenant}} {{outcome}}": "sum by (tenant, outcome) (rate(splitserve_tenant_requests_total[1m]))"
            },
        ),
        Panel(
            "Requests in progress",
            "short",
            {"{{tenant}}": "sum by (tenant) (splitserve_tenant_running_requests)"},
        ),
        Panel(
            "Tokens charged, a second",
            "short",
            {"{{tenant}} {{kind}}": "sum by (tenant, kind) (rate(splitserve_tenant_tokens_total[1m]))"},
        ),
        Panel(
            "Prefill seconds, a second",
            "short",
            {"{{tenant}}": "sum by (tenant) (rate(splitserve_tenant_prefill_seconds_total[1m]))"},
        ),
        Panel(
            "Decode seconds, a second",
            "short",
            {"{{tenant}}": "sum by (tenant) (rate(splitserve_tenant_decode_seconds_total[1m]))"},
        ),
        Panel(
            "KV blocks held",
            "short",
            {"{{tenant}}": "sum by (tenant) (rate(splitserve_tenant_kv_block_seconds_total[1m]))"},
        ),
        Panel(
            "KV written by tenant",
            "Bps",
            {"{{tenant}}": "sum by (tenant) (rate(splitserve_tenant_kv_written_bytes_total[1m]))"},
        ),
        Panel(
            "Calls without a known key",
            "reqps",
            {"calls": "sum(rate(splitserve_unauthenticated_calls_total[1m]))"},
        ),
    ),
)
