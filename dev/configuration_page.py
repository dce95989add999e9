"""Writes docs/configuration.md from the settings' own declarations; `--check` proves that it is current."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from autoscaler.behavior import Behavior, ScalingRule, ScalingRules
from autoscaler.policy_file import PredictivePool, Ratio, ScalingPolicy, SchedulePool, SloPool, TargetPool
from autoscaler.schedule import ScheduleWindow
from autoscaler.slo_tuning import SloTuning
from coordinator.tenants.policy_file import TenantPolicy, TenantsFile
from splitserve.config import (
    AutoscalerConfig,
    ClusterConfig,
    CoordinatorConfig,
    DockerConfig,
    EngineConfig,
    KubernetesConfig,
    WorkerConfig,
)
from splitserve.fault_plan import FaultPlan, Trigger
from splitserve.security_settings import CeilingConfig, TlsConfig
from splitserve.traffic_settings import CircuitBreakerConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """# Configuration

Written by `make docs` from `splitserve/config.py` and the models of the policy file in `autoscaler/`.

Every setting can stand in a YAML file given with `--config FILE`; options on the command line win. The file of a
command holds that command's settings: `splitserve up` those of the cluster, `splitserve coordinator` those of the
coordinator, `splitserve prefill-worker` and `decode-worker` those of the worker. A section is a nested mapping:

    prefill: 2
    decode: 1
    engine:
      dtype: float32
      max_step_tokens: 512
    coordinator:
      grpc_port: 50051

A wrong value ends the command with one line that names the setting and its bound.
"""
SECTIONS: list[tuple[str, type[BaseModel]]] = [
    ("Cluster (`splitserve up`)", ClusterConfig),
    ("Coordinator", CoordinatorConfig),
    ("Circuit breaker (section `circuit_breaker` of the coordinator)", CircuitBreakerConfig),
    ("Worker", WorkerConfig),
    ("Engine (section `engine`)", EngineConfig),
    ("TLS (section `tls`)", TlsConfig),
    ("Ceilings (section `ceilings` of a worker)", CeilingConfig),
    ("File of tenants (see [security.md](security.md))", TenantsFile),
    ("File of tenants: an entry of `tenants`", TenantPolicy),
    ("Autoscaler (`splitserve autoscaler`)", AutoscalerConfig),
    ("Docker (section `docker` of the autoscaler)", DockerConfig),
    ("Kubernetes (section `kubernetes` of the autoscaler)", KubernetesConfig),
    ("Faults (section `faults` of a worker, for tests only)", FaultPlan),
    ("Trigger (a nested mapping in `faults`)", Trigger),
    ("Policy file (see [autoscaling.md](autoscaling.md))", ScalingPolicy),
    ("Policy file: a pool, `kind: slo`", SloPool),
    ("Policy file: section `slo` of a pool", SloTuning),
    ("Policy file: a pool, `kind: target`", TargetPool),
    ("Policy file: a pool, `kind: schedule`", SchedulePool),
    ("Policy file: a pool, `kind: predictive`", PredictivePool),
    ("Policy file: a window of `schedule`", ScheduleWindow),
    ("Policy file: section `behavior` of a pool", Behavior),
    ("Policy file: `scaleUp` and `scaleDown`", ScalingRules),
    ("Policy file: an entry of `policies`", ScalingRule),
    ("Policy file: section `ratio`", Ratio),
]


def bounds(schema: dict[str, Any]) -> str:
    """A setting's bounds in words, from its JSON schema."""
    options = schema.get("anyOf", [schema])
    parts = []
    for option in options:
        if "enum" in option:
            parts.append(", ".join(f"`{value}`" for value in option["enum"]))
        low, above = option.get("minimum"), option.get("exclusiveMinimum")
        high, below = option.get("maximum"), option.get("exclusiveMaximum")
        if low is not None or above is not None:
            end = f"{high or '∞'}]" if below is None else f"{below})"
            parts.append(f"{'[' if above is None else '('}{low if above is None else above}, {end}")
        if "pattern" in option:
            parts.append(f"`{option['pattern']}`".replace("|", "\\|"))
    return "; ".join(parts)


def table(kind: type[BaseModel]) -> str:
    """One section's settings as a table."""
    schema = kind.model_json_schema()["properties"]
    rows = ["| setting | default | range | meaning |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True)
        nested = isinstance(default, BaseModel)
        shown = (
            "required"
            if default is PydanticUndefined
            else ""
            if nested or default is None
            else f"`{default}`"
        )
        meaning = (field.description or "").replace("\n", " ")
        rows.append(f"| `{name}` | {shown} | {bounds(schema[name])} | {meaning} |")
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    return HEAD + "".join(f"\n## {title}\n\n{table(kind)}\n" for title, kind in SECTIONS)


def main() -> int:
    """Writes the page, or with `--check` fails if it differs."""
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") == page():
            return 0
        print("docs/configuration.md is out of date: run `make docs`", file=sys.stderr)
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
