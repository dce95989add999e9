"""Settings of the autoscaler service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from splitserve.config.base import BASIC, CoordinatorAddress, Option, Port, Settings
from splitserve.config.gpu_list import GpuGroups
from splitserve.config.security import SecuritySettings

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
    kubeconfig: Path | None = None
    """File with the API server's address and credentials. Default: the pod's service account, or `~/.kube/config`."""
    context: Annotated[str | None, Option(flag="kube-context")] = None
    """Context in the kubeconfig. Default: its current context."""


class DockerConfig(Settings):
    """The compose project whose workers are scaled, on the Docker Engine at DOCKER_HOST or the local one, or on those
    of `hosts`."""

    project: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$"), Option(env="COMPOSE_PROJECT_NAME")] = (
        "splitserve"
    )
    """Compose project to scale."""
    hosts: Annotated[Path | None, Option(flag="docker-hosts")] = None
    """File of several Docker hosts (docs/quickstart/several-hosts.md), each with its own GPUs; `gpus` and
    `replicas_per_gpu` are then not used. Default: one Engine."""
    gpus: Annotated[GpuGroups, Option(metavar="0,1;2,3|auto", env="SPLITSERVE_GPUS")] = ""
    """GPUs for Docker replicas: numbers as `nvidia-smi -L` prints them, UUIDs, or UUIDs of MIG slices. Semicolons stand
    between groups that share NVLink; a group may begin with its kind, `H100=0,1;L40S=2,3`, for pools that name one
    (`gpu`). `auto`: all GPUs of the autoscaler's machine, as NVIDIA's driver shows them to it
    (`pip install 'splitserve[nvml]'`). Default: replicas get none."""
    replicas_per_gpu: Annotated[int, Field(ge=1, le=16), Option(env="SPLITSERVE_REPLICAS_PER_GPU")] = 1
    """How many replicas may share one GPU; above 1 with MPS, for a prefill and a decode worker on one GPU
    (docs/guides/gpus.md). Replicas of the other pool are preferred as neighbours."""


class AutoscalerConfig(SecuritySettings):
    """The autoscaler as a separate service."""

    policy: Annotated[Path, BASIC]
    """Policy file that says how each pool scales."""
    coordinators: Annotated[
        tuple[CoordinatorAddress, ...],
        Field(min_length=1),
        Option(flag="coordinator", metavar="HOST:PORT", tier="basic"),
    ] = ("127.0.0.1:50051",)
    """Address, "host:port", of each coordinator to observe and to send plans to."""
    actuator: Annotated[Literal["docker", "kubernetes", "none"], BASIC] = "none"
    """Where replicas run. `none`: decide and log only."""
    dry_run: Annotated[bool, BASIC] = False
    """Observe replicas, decide and log, but change nothing."""
    lease_s: Annotated[float, Field(ge=1, le=600)] = 30.0
    """Of several autoscalers that are given the same coordinators, one acts; another takes over when it has not been
    heard of for this long. The same for all of them, and longer than the interval."""
    window_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """Time window of the latencies that a decision considers."""
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
