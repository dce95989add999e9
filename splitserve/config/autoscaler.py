"""Settings of the autoscaler service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from splitserve.config.base import CoordinatorAddress, Option, Port, Settings
from splitserve.config.gpu_list import GpuGroups
from splitserve.config.security import SecuritySettings
from splitserve.errors import ConfigError

ReplicaClassName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
Workload = Annotated[str, Field(pattern=r"^(deployment|statefulset)/[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]


class KubernetesConfig(Settings):
    """The workloads of the pools. Each pod's worker id must be the pod's name."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")] | None = None
    """Namespace of the workloads. Default: the autoscaler's own, or that of the kubeconfig's context."""
    prefill: Annotated[Workload, Option(flag="prefill-workload", metavar="KIND/NAME")] = (
        "deployment/splitserve-prefill"
    )
    """Workload of the prefill pool: kind and name."""
    decode: Annotated[Workload, Option(flag="decode-workload", metavar="KIND/NAME")] = (
        "deployment/splitserve-decode"
    )
    """Workload of the decode pool: kind and name."""
    classes: Annotated[
        tuple[ReplicaClassName, ...], Field(max_length=16), Option(flag="workload-class", metavar="CLASS")
    ] = ()
    """Replica classes of the policy that have workloads of their own, named after those of the pools: with
    `deployment/decode` and the class `h100` that is `deployment/decode-h100`. Repeatable; a pool may lack one. Default:
    each pool is one workload."""
    kubeconfig: Path | None = None
    """File with the API server's address and credentials. Default: the pod's service account, or `~/.kube/config`."""
    context: Annotated[str | None, Option(flag="kube-context")] = None
    """Context in the kubeconfig. Default: its current context."""
    request_timeout_s: Annotated[float, Field(gt=0, le=300), Option(flag="kubernetes-request-timeout")] = 5.0
    """Deadline of one call to the API server."""


class DockerConfig(Settings):
    """The compose project whose workers are scaled, on the Docker Engine at DOCKER_HOST or the local one, or on those
    of `hosts`."""

    project: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$"), Option(env="COMPOSE_PROJECT_NAME")] = (
        "splitserve"
    )
    """Compose project to scale."""
    hosts: Annotated[Path | None, Option(flag="docker-hosts")] = None
    """File of several Docker hosts (docs/hosts.md), each with its own GPUs; `gpus` and `replicas_per_gpu` are then not
    used. Default: one Engine."""
    gpus: Annotated[GpuGroups, Option(metavar="0,1;2,3|auto", env="SPLITSERVE_GPUS")] = ""
    """GPUs for Docker replicas: numbers as `nvidia-smi -L` prints them, UUIDs, or UUIDs of MIG slices. Semicolons stand
    between groups that share NVLink; a group may begin with its kind, `H100=0,1;L40S=2,3`, for classes that name one
    (`gpu`). `auto`: all GPUs of the autoscaler's machine, as NVIDIA's driver shows them to
    it (`pip install 'splitserve[nvml]'`). Default: replicas get none."""
    replicas_per_gpu: Annotated[int, Field(ge=1, le=16), Option(env="SPLITSERVE_REPLICAS_PER_GPU")] = 1
    """How many replicas may share one GPU; above 1 with MPS, for a prefill and a decode worker on one GPU
    (docs/gpus.md). Replicas of the other pool are preferred as neighbours."""
    request_timeout_s: Annotated[float, Field(ge=1, le=300), Option(flag="docker-request-timeout")] = 10.0
    """Deadline of one request to the Engine."""


class AutoscalerConfig(SecuritySettings):
    """The autoscaler as a separate service."""

    policy: Path | None = None
    """Policy file that says how each pool scales. Either this or `models`."""
    models: Path | None = None
    """File of several models that share one inventory, each with a policy file of its own, and what they may have
    together (docs/shared-budget.md)."""
    coordinators: Annotated[
        tuple[CoordinatorAddress, ...],
        Field(min_length=1),
        Option(flag="coordinator", metavar="HOST:PORT"),
    ] = ("127.0.0.1:50051",)
    """Address, "host:port", of each coordinator to observe and to send plans to."""
    shadow: Annotated[tuple[Path, ...], Field(max_length=8), Option(metavar="FILE")] = ()
    """Policy files that decide on the same snapshots beside `policy`, and are never acted on: metrics and the log show
    what they want. Repeatable, up to 8; each is named after its file. Read at the start."""
    shadow_window_s: Annotated[float, Field(ge=1, le=3600)] = 600.0
    """How much recorded traffic is replayed at a time, each time it is over, with `policy` and with each `shadow`: what
    they would have made of it."""
    actuator: Literal["docker", "kubernetes", "none"] = "none"
    """Where replicas run. `none`: decide and log only."""
    dry_run: bool = False
    """Observe replicas, decide and log, but change nothing."""
    lease_s: Annotated[float, Field(ge=1, le=600)] = 30.0
    """Of several autoscalers that are given the same coordinators, one acts; another takes over when it has not been
    heard of for this long. The same for all of them, and longer than the interval."""
    interval_s: Annotated[float, Field(ge=0.1, le=3600)] | None = None
    """Time between decisions. Default: the policy's."""
    window_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """Time window of the latencies that a decision considers."""
    history_file: Path | None = None
    """File in which arrivals, measured cold starts and the seasons of `predictive` outlive a restart, replaced each
    5 s; each autoscaler needs its own. One that cannot be used is ignored with a line in the log. Default: forecasts
    begin anew."""
    model: str = ""
    """Consider only this model's traffic and scale only its workers; on Docker those are the containers whose label
    `splitserve.model` names it. Needed where the coordinators serve several models. Default: all of them."""
    api_key_file: Path | None = None
    """File with an admin key, for coordinators with tenants but without common `tls` or token. Default: none."""
    host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint."""
    metrics_port: Port | None = None
    """Port of a Prometheus endpoint on `host`; 0 takes a free one. Default: no endpoint."""
    docker: DockerConfig = DockerConfig()
    """Section `docker`."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Section `kubernetes`."""

    @property
    def one_policy(self) -> Path:
        """The policy file of one model. Raises ConfigError where there is none."""
        if self.policy is None:
            message = "policy: Field required, or a file of several models: models (--models)"
            raise ConfigError(message, field="policy")
        return self.policy

    @property
    def models_file(self) -> Path:
        """The file of several models. Raises ConfigError where a setting is given that its models have."""
        alone = {"policy": self.policy, "model": self.model, "history_file": self.history_file}
        for name, value in {**alone, "shadow": self.shadow}.items():
            if value:
                message = (
                    f"{name} must not be given with models (--models), whose file has what differs by model"
                )
                raise ConfigError(message, field=name)
        assert self.models is not None
        return self.models
