"""Writes docs/configuration.md from the settings' own declarations; `--check` verifies that it is current."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from autoscaler.classes.replica_class import ReplicaClass
from autoscaler.policies.behavior import Behavior, ScalingRule, ScalingRules
from autoscaler.policies.policy_file import (
    CustomPool,
    PredictivePool,
    Ratio,
    ScalingPolicy,
    SchedulePool,
    SloPool,
    TargetPool,
)
from autoscaler.policies.schedule import ScheduleWindow
from autoscaler.policies.slo.slo_tuning import SloTuning
from autoscaler.sharing.models_file import ScaledModel, SharedModels
from coordinator.records.tenant_costs import PriceFile
from coordinator.tenants.policy_file import TenantPolicy, TenantsFile
from splitserve.cli.up import SHOWN
from splitserve.config.autoscaler import AutoscalerConfig, DockerConfig, KubernetesConfig
from splitserve.config.base import Settings
from splitserve.config.cluster import ClusterConfig
from splitserve.config.command_line import Setting, default_text, settings_of
from splitserve.config.coordinator import (
    AdmissionConfig,
    CircuitBreakerConfig,
    CoordinatorConfig,
    QualityConfig,
    RecordsConfig,
    SpotMovesConfig,
)
from splitserve.config.engine import EngineConfig
from splitserve.config.faults import FaultPlan, Trigger
from splitserve.config.security import CeilingConfig, TlsConfig
from splitserve.config.tracing import RequestTracingConfig, TracingConfig
from splitserve.config.worker import SpotNoticeConfig, WorkerConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

Written by `make docs` from the models of the settings, of the policy file, of the file of tenants and of that of
prices.

Every setting can stand in a YAML file given with `--config FILE`. A variable of the environment wins over the file, an
option on the command line over both. The file of a command holds that command's settings: `splitserve up` those of the
cluster, `splitserve coordinator` those of the coordinator, `splitserve worker`, `prefill-worker` and `decode-worker`
those of the worker. A section is a nested mapping:

    prefill: 2
    decode: 1
    engine:
      dtype: float32
      max_step_tokens: 512
    coordinator:
      grpc_port: 50051

A variable is called `SPLITSERVE_` and the setting's path, in capitals: `engine.dtype` is `SPLITSERVE_ENGINE_DTYPE`,
and for `splitserve up` the coordinator's `grpc_port` is `SPLITSERVE_COORDINATOR_GRPC_PORT`. White space separates the
items of a list. An empty variable is as good as none, and so is one that Kubernetes sets for a service (`tcp://...`).
What `splitserve up` starts gets its settings from `splitserve up` alone.

A wrong value ends the command with one line that names the setting and its bound. A setting that has no effect beside
the others, such as `leaning` on a prefill worker or `page_token_file` with `page: off`, is ignored with a warning, for
files and variables may be shared. YAML files have each key of a mapping once. They and files of secrets and
certificates have at most 4 MiB, a policy 1 MiB, a tenants file 64 MiB; one that is not followed may be a pipe that
ends within 5 s, as the shell's `<(command)` is. A pipe of settings (`--config`) or with a trace (`--trace`) may take as
long as it needs, but give nothing for at most 60 s. /dev/null is an empty file.
"""


class Section(NamedTuple):
    """One table of the page. Settings with options and variables belong to a command and have a path in it."""

    title: str
    kind: type[BaseModel]
    command: type[Settings] | None = None
    path: str = ""
    shown: tuple[str, ...] | None = None
    """Paths of the settings that have an option; None: all."""


SECTIONS = [
    Section("Cluster (`splitserve up`)", ClusterConfig, ClusterConfig, shown=SHOWN),
    Section("Coordinator", CoordinatorConfig, CoordinatorConfig),
    Section(
        "Admission (section `admission` of the coordinator)", AdmissionConfig, CoordinatorConfig, "admission."
    ),
    Section("Records (section `records` of the coordinator)", RecordsConfig, CoordinatorConfig, "records."),
    Section("Quality (section `quality` of the coordinator)", QualityConfig, CoordinatorConfig, "quality."),
    Section(
        "Tracing (section `tracing` of the coordinator)", RequestTracingConfig, CoordinatorConfig, "tracing."
    ),
    Section("Spot (section `spot` of the coordinator)", SpotMovesConfig, CoordinatorConfig, "spot."),
    Section("Circuit breaker (section `circuit_breaker` of the coordinator)", CircuitBreakerConfig),
    Section("Worker", WorkerConfig, WorkerConfig),
    Section("Tracing (section `tracing` of a worker)", TracingConfig, WorkerConfig, "tracing."),
    Section("Spot (section `spot` of a worker)", SpotNoticeConfig, WorkerConfig, "spot."),
    Section("Engine (section `engine`)", EngineConfig, WorkerConfig, "engine."),
    Section("TLS (section `tls`)", TlsConfig, WorkerConfig, "tls."),
    Section("Ceilings (section `ceilings` of a worker)", CeilingConfig, WorkerConfig, "ceilings."),
    Section("File of tenants (see [security.md](security.md))", TenantsFile),
    Section("File of tenants: an entry of `tenants`", TenantPolicy),
    Section("File of prices (see [operations.md](operations.md#what-tenants-cost))", PriceFile),
    Section("Autoscaler (`splitserve autoscaler`)", AutoscalerConfig, AutoscalerConfig),
    Section("Docker (section `docker` of the autoscaler)", DockerConfig, AutoscalerConfig, "docker."),
    Section(
        "Kubernetes (section `kubernetes` of the autoscaler)",
        KubernetesConfig,
        AutoscalerConfig,
        "kubernetes.",
    ),
    Section("Faults (section `faults` of a worker, for tests only)", FaultPlan),
    Section("Trigger (a nested mapping in `faults`)", Trigger),
    Section("File of models (see [shared-budget.md](shared-budget.md))", SharedModels),
    Section("File of models: an entry of `models`", ScaledModel),
    Section("Policy file (see [autoscaling.md](autoscaling.md))", ScalingPolicy),
    Section("Policy file: a pool, `kind: slo`", SloPool),
    Section("Policy file: section `slo` of a pool", SloTuning),
    Section("Policy file: a pool, `kind: target`", TargetPool),
    Section("Policy file: a pool, `kind: schedule`", SchedulePool),
    Section("Policy file: a pool, `kind: predictive`", PredictivePool),
    Section("Policy file: a pool, `kind: custom`", CustomPool),
    Section("Policy file: an entry of `classes` of a pool", ReplicaClass),
    Section("Policy file: a window of `schedule`", ScheduleWindow),
    Section("Policy file: section `behavior` of a pool", Behavior),
    Section("Policy file: `scaleUp` and `scaleDown`", ScalingRules),
    Section("Policy file: an entry of `policies`", ScalingRule),
    Section("Policy file: section `ratio`", Ratio),
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


def table(section: Section) -> str:
    """One section's settings as a table."""
    schema = section.kind.model_json_schema()["properties"]
    given = (
        {} if section.command is None else {setting.path: setting for setting in settings_of(section.command)}
    )
    columns = ["setting", "default", "range", "meaning"] + ["option", "variable"] * bool(given)
    rows = [_row(columns), "|" + "---|" * len(columns)]
    for name, field in section.kind.model_fields.items():
        default = field.get_default(call_default_factory=True)
        cells = [
            f"`{name}`",
            "required"
            if default is PydanticUndefined and not default_text(field).startswith("Default")
            else "",
            bounds(schema[name]),
            (field.description or "").replace("\n", " "),
        ]
        if default is not PydanticUndefined and default is not None and not isinstance(default, BaseModel):
            cells[1] = f"`{default}`"
        if given:
            cells += _names(section, given.get(section.path + name))
        rows.append(_row(cells))
    return "\n".join(rows)


def _names(section: Section, setting: Setting | None) -> list[str]:
    """Option and variable; empty for sections, which have none."""
    if setting is None:
        return ["", ""]
    shown = section.shown is None or setting.path in section.shown
    return [f"`{setting.flag}`" if shown else "", f"`{setting.variable}`"]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _options_of_sections(section: Section) -> str:
    """Sections whose settings `splitserve up` has as options."""
    if section.command is None or section.shown is None:
        return ""
    shown = [setting for setting in settings_of(section.command) if setting.path in section.shown]
    inner = [f"`{setting.flag}` (`{setting.path}`)" for setting in shown if "." in setting.path]
    return f"\nOptions for settings in its sections: {', '.join(inner)}.\n"


def page() -> str:
    """The whole page."""
    parts = (f"\n## {each.title}\n\n{table(each)}\n{_options_of_sections(each)}" for each in SECTIONS)
    return HEAD + "".join(parts)


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
