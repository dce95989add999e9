"""Panels of Grafana dashboards: what one is, and those of the service and its pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time. `queries`: PromQL by legend, in which `{{label}}` stands for a label's value."""

    title: str
    unit: str
    """Grafana's name of a unit."""
    queries: Mapping[str, str]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page of panels in rows of two."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


def quantile(share: float, series: str, where: str = "", by: str = "") -> str:
    """PromQL of a quantile of a histogram over the last minute, by labels."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({labels}) (rate({series}_bucket{where}[1m])))"


def phase(name: str) -> str:
    """PromQL of the 95th percentile of a phase, warm requests only."""
    return quantile(0.95, "splitserve_request_phase_seconds", f'{{cold="false", phase="{name}"}}')


_WARM = '{cold="false"}'
_TTFT, _TPOT = "splitserve_time_to_first_token_seconds", "splitserve_time_per_output_token_seconds"

SERVICE = Dashboard(
    "splitserve",
    "splitserve: service",
    (
        Panel(
            "Error budget: how fast failures use it",
            "none",
            {
                f"last {window}": f"splitserve:availability:burn_rate{window}"
                for window in ("5m", "30m", "1h", "6h")
            },
            "1 uses the budget of a month up in a month. Alerts from 14.4 (1h) and 6 (6h) on.",
        ),
        Panel(
            "Error budget: how fast late first tokens use it",
            "none",
            {f"last {window}": f"splitserve:ttft:burn_rate{window}" for window in ("5m", "30m", "1h", "6h")},
            "95% within 1.9 s, cold starts included.",
        ),
        Panel(
            "Time to first token",
            "s",
            {
                "p50": quantile(0.5, _TTFT, _WARM),
                "p95": quantile(0.95, _TTFT, _WARM),
                "p99": quantile(0.99, _TTFT, _WARM),
                "p95 of long prompts": quantile(0.95, _TTFT, '{cold="false", prompt="long"}'),
            },
        ),
        Panel(
            "Time per output token",
            "s",
            {
                "p50": quantile(0.5, _TPOT, _WARM),
                "p95": quantile(0.95, _TPOT, _WARM),
                "p99": quantile(0.99, _TPOT, _WARM),
            },
        ),
        Panel(
            "Demand",
            "short",
            {"{{kind}} tokens/s": "sum by (kind) (rate(splitserve_arrived_tokens_total[1m]))"},
        ),
        Panel(
            "Requests by how they ended",
            "reqps",
            {"{{outcome}}": "sum by (outcome) (rate(splitserve_requests_ended_total[1m]))"},
        ),
        Panel(
            "Requests in progress by what they wait for",
            "short",
            {"{{stage}}": "sum by (stage) (splitserve_request_stages)"},
        ),
        Panel(
            "Where the time to the first token goes (p95)",
            "s",
            {
                name: phase(name)
                for name in ("admit", "reserve", "prefill_queue", "prefill_compute", "transfer")
            },
        ),
        Panel(
            "Event loop of the coordinators: lag (p99)",
            "s",
            {"{{instance}}": quantile(0.99, "splitserve_event_loop_lag_seconds", by="instance")},
        ),
        Panel(
            "Queue of admission",
            "short",
            {"{{class}}": "sum by (class) (splitserve_admission_queued_requests)"},
        ),
    ),
)

POOLS = Dashboard(
    "splitserve-pools",
    "splitserve: pools",
    (
        Panel(
            "Prefill replicas", "short", {"{{state}}": 'max by (state) (splitserve_replicas{role="prefill"})'}
        ),
        Panel(
            "Decode replicas", "short", {"{{state}}": 'max by (state) (splitserve_replicas{role="decode"})'}
        ),
        Panel("Prompt tokens that wait", "short", {"tokens": "sum(splitserve_prefill_backlog_tokens)"}),
        Panel(
            "KV blocks in use on decode workers",
            "percentunit",
            {"{{model}}": "max by (model) (splitserve_decode_kv_usage_ratio)"},
        ),
        Panel(
            "Step time (p95)",
            "s",
            {"{{job}} {{kind}}": quantile(0.95, "splitserve_step_seconds", by="job, kind")},
        ),
        Panel(
            "Sequences of a step (mean)",
            "short",
            {
                "{{job}} {{kind}}": "sum by (job, kind) (rate(splitserve_step_sequences_sum[1m])) / "
                "sum by (job, kind) (rate(splitserve_step_sequences_count[1m]))"
            },
        ),
        Panel(
            "Tokens computed",
            "short",
            {"{{job}} {{tokens}}/s": "sum by (job, tokens) (rate(splitserve_step_tokens_total[1m]))"},
        ),
        Panel(
            "Prompt tokens found in a prefix cache",
            "percentunit",
            {
                "{{pool}}": "sum by (pool) (rate(splitserve_prefix_hit_tokens_total[5m])) / on () group_left () "
                "sum(rate(splitserve_prefix_looked_up_tokens_total[5m]))"
            },
            "prefill: not computed again. decode: not sent again.",
        ),
        Panel(
            "KV blocks by owner", "short", {"{{job}} {{state}}": "sum by (job, state) (splitserve_kv_blocks)"}
        ),
        Panel(
            "GPU: time with a kernel",
            "percentunit",
            {"{{instance}} {{gpu}}": "splitserve_gpu_utilization_ratio"},
        ),
        Panel(
            "GPU: memory in use",
            "percentunit",
            {"{{instance}} {{gpu}}": "splitserve_gpu_memory_used_bytes / splitserve_gpu_memory_total_bytes"},
        ),
        Panel("GPU: power", "watt", {"{{instance}} {{gpu}}": "splitserve_gpu_power_watts"}),
        Panel("GPU: temperature", "celsius", {"{{instance}} {{gpu}}": "splitserve_gpu_temperature_celsius"}),
    ),
)
