"""Writes docs/reference/configuration.md from the settings' own declarations; `--check` verifies that it is current."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from autoscaler.policies.behavior import Behavior, ScalingRule, ScalingRules
from autoscaler.policies.policy_file import (
    CustomPool,
    PoolPolicy,
    PredictivePool,
    ScalingPolicy,
    SchedulePool,
    SloPool,
    SloTuning,
    TargetPool,
)
from autoscaler.policies.schedule import ScheduleWindow
from coordinator.tenants.policy_file import TenantPolicy, TenantsFile
from splitserve.config.autoscaler import AutoscalerConfig, DockerConfig, KubernetesConfig
from splitserve.config.base import Settings, option_of
from splitserve.config.cluster import ClusterConfig
from splitserve.config.command_line import TIERS, Setting, default_text, options_of, settings_of
from splitserve.config.coordinator import (
    AdmissionConfig,
    CanaryConfig,
    CircuitBreakerConfig,
    CoordinatorConfig,
    RecordsConfig,
)
from splitserve.config.engine import EngineConfig
from splitserve.config.security import CeilingConfig, TlsConfig
from splitserve.config.tracing import RequestTracingConfig, TracingConfig
from splitserve.config.worker import WorkerConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "configuration.md"
HEAD = """# Configuration

Written by `make docs` from the models of the settings, of the policy file and of the file of tenants.

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

`--help` of a command shows its basic settings, which come first in each table here; `--help-all` shows all. Of settings
of `splitserve up` with the same option, as `host` of several sections, the cluster's own or the engine's has it; the
others are set by file or variable. Settings for tests alone are not listed: the times of engine `simulated`
(`splitserve/config/engine.py`).

A wrong value ends the command with one line that names the setting and its bound. A setting that has no effect
beside the others, such as `page_token_file` with `page: off`, is ignored with a warning, for files and variables
may be shared. YAML files have each key of a mapping once. They and files of secrets and certificates have at most 4
MiB, a policy 1 MiB, a tenants file 64 MiB. One that is read once may be a pipe, such as the shell's `<(command)`, which
may take as long as it needs, but give nothing for at most 60 s. /dev/null is an empty file.
"""


class Section(NamedTuple):
    """One table of the page. Settings with options and variables belong to a command and have a path in it."""

    title: str
    kind: type[BaseModel]
    command: type[Settings] | None = None
    path: str = ""
    base: type[BaseModel] | None = None
    """A model with a section of its own, whose fields are not repeated here."""


SECTIONS = [
    Section("Cluster (`splitserve up`)", ClusterConfig, ClusterConfig),
    Section("Coordinator", CoordinatorConfig, CoordinatorConfig),
    Section(
        "Admission (section `admission` of the coordinator)", AdmissionConfig, CoordinatorConfig, "admission."
    ),
    Section("Records (section `records` of the coordinator)", RecordsConfig, CoordinatorConfig, "records."),
    Section("Canary (section `canary` of the coordinator)", CanaryConfig, CoordinatorConfig, "canary."),
    Section(
        "Tracing (section `tracing` of the coordinator)", RequestTracingConfig, CoordinatorConfig, "tracing."
    ),
    Section("Circuit breaker (section `circuit_breaker` of the coordinator)", CircuitBreakerConfig),
    Section("Worker", WorkerConfig, WorkerConfig),
    Section("Tracing (section `tracing` of a worker)", TracingConfig, WorkerConfig, "tracing."),
    Section("Engine (section `engine`)", EngineConfig, WorkerConfig, "engine."),
    Section("TLS (section `tls`)", TlsConfig, WorkerConfig, "tls."),
    Section("Ceilings (section `ceilings` of a worker)", CeilingConfig, WorkerConfig, "ceilings."),
    Section("File of tenants (see [security](../guides/security.md))", TenantsFile),
    Section("File of tenants: an entry of `tenants`", TenantPolicy),
    Section("Autoscaler (`splitserve autoscaler`)", AutoscalerConfig, AutoscalerConfig),
    Section("Docker (section `docker` of the autoscaler)", DockerConfig, AutoscalerConfig, "docker."),
    Section(
        "Kubernetes (section `kubernetes` of the autoscaler)",
        KubernetesConfig,
        AutoscalerConfig,
        "kubernetes.",
    ),
    Section("Policy file (see [autoscaling](../guides/autoscaling.md))", ScalingPolicy),
    Section("Policy file: a pool of any kind", PoolPolicy),
    Section("Policy file: a pool, `kind: slo`", SloPool, base=PoolPolicy),
    Section("Policy file: section `slo` of a pool", SloTuning),
    Section("Policy file: a pool, `kind: target`", TargetPool, base=PoolPolicy),
    Section("Policy file: a pool, `kind: schedule`", SchedulePool, base=PoolPolicy),
    Section(
        "Policy file: a pool, `kind: predictive` (with the fields of `slo`)", PredictivePool, base=SloPool
    ),
    Section("Policy file: a pool, `kind: custom`", CustomPool, base=PoolPolicy),
    Section("Policy file: a window of `schedule`", ScheduleWindow),
    Section("Policy file: section `behavior` of a pool", Behavior),
    Section("Policy file: `scaleUp` and `scaleDown`", ScalingRules),
    Section("Policy file: an entry of `policies`", ScalingRule),
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
    for name, field in sorted(section.kind.model_fields.items(), key=lambda item: _tier(item[1])):
        if option_of(field).tier == "internal":
            continue
        if section.base is not None and repr(field) == repr(section.base.model_fields.get(name)):
            continue
        default = field.get_default(call_default_factory=True)
        cells = [
            f"`{name}`",
            "required"
            if default is PydanticUndefined and not default_text(field).startswith("Default")
            else "",
            bounds(schema[name]),
            _linked((field.description or "").replace("\n", " ")),
        ]
        if default is not PydanticUndefined and default is not None and not isinstance(default, BaseModel):
            cells[1] = f"`{default}`"
        if given:
            cells += _names(section.command, given.get(section.path + name))
        rows.append(_row(cells))
    return "\n".join(rows)


def _tier(field: FieldInfo) -> int:
    """Basic settings come first."""
    return TIERS.index(option_of(field).tier)


def _names(command: type[Settings] | None, setting: Setting | None) -> list[str]:
    """Option and variable; empty for sections, which have none."""
    if setting is None or command is None:
        return ["", ""]
    shown = setting.path in {shown_setting.path for shown_setting in options_of(command)}
    return [f"`{setting.flag}`" if shown else "", f"`{setting.variable}`"]


def _linked(text: str) -> str:
    """The description, with a link for each page that it names by its path."""
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", text)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(f"\n## {section.title}\n\n{table(section)}\n" for section in SECTIONS)


def main() -> int:
    """Writes the page, or with `--check` fails if it differs."""
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") == page():
            return 0
        print("docs/reference/configuration.md is out of date: run `make docs`", file=sys.stderr)
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
