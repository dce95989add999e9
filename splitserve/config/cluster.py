"""Settings of a local cluster (`splitserve up`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from splitserve.config.base import BASIC, Option, idle_among
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.engine import EngineConfig, EngineForModel
from splitserve.errors import ConfigError


class ClusterConfig(EngineForModel):
    """A local cluster, as `splitserve up` starts it."""

    without_options = ("coordinator.tls", "coordinator.cluster_token_file")

    model: Annotated[str, BASIC] = "smollm2-135m-instruct"
    """Embedded model's name, folder, GGUF file or Hugging Face id. "simulated" needs no files."""
    served_model_name: str | None = None
    """Model name for clients. Default: the model's own short name."""
    prefill: Annotated[int, Field(ge=1, le=64), BASIC] = 1
    """Number of prefill workers."""
    decode: Annotated[int, Field(ge=1, le=64), BASIC] = 1
    """Number of decode workers."""
    workers: Annotated[int, Field(ge=1, le=64)] | None = None
    """Number of workers of role both, instead of prefill and decode workers: each computes prompts and streams tokens.
    Not together with `prefill`, `decode` or `autoscale`. Default: none."""
    coordinators: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of coordinators; all use all workers, and each further one listens on the next ports. Only one with
    `autoscale`."""
    transport: Literal["nixl", "ucx"] = "nixl"
    """Transport of KV between workers. `ucx` needs `pip install 'splitserve[ucx]'`."""
    verify_kv: Literal["auto", "off", "sampled", "all"] = "auto"
    """Checksums of received KV, as in the workers' settings."""
    prefill_gpus: Annotated[int, Field(ge=0, le=64)] = 1
    """GPUs of each prefill worker, on a machine that has any; 0: it computes on cpu. With `autoscale` the policy's
    `gpus_per_replica` instead."""
    decode_gpus: Annotated[int, Field(ge=0, le=64)] = 1
    """GPUs of each decode worker, likewise."""
    worker_gpus: Annotated[int, Field(ge=0, le=64)] = 1
    """GPUs of each worker of `workers`, likewise."""
    replicas_per_gpu: Annotated[int, Field(ge=1, le=16)] = 1
    """How many workers may share one GPU. Above 1 run MPS, or they take turns (docs/guides/gpus.md); each worker then
    takes its part of `engine.device_memory_share`."""
    pin_cores: bool = True
    """Pin each worker to its own cores."""
    ready_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 300.0
    """Time limit for the cluster to become ready."""
    autoscale: Annotated[Path | None, BASIC] = None
    """Policy file by which both pools are scaled. The number of workers starts at `prefill` and `decode` if given, else
    at the policy's `min_replicas`, or one where that is 0. Cores are divided among as many workers as the policy
    allows. Default: a fixed number of workers."""
    autoscale_window_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """Time window of the latencies that a scaling decision considers."""
    tls: Annotated[Path | None, Option(metavar="DIR", env="SPLITSERVE_CLUSTER_TLS", tier="basic")] = None
    """Folder of `splitserve certs`, for mutual TLS. Default: no encryption."""
    cluster_token_file: Path | None = None
    """File with the secret that coordinator and workers share. Default: a random secret at each start."""
    engine: EngineConfig = EngineConfig()
    """Section `engine`, the same for all workers."""
    coordinator: CoordinatorConfig = CoordinatorConfig()
    """Section `coordinator`. Its `tls` and `cluster_token_file` are those of the cluster."""

    def check_own_security(self) -> None:
        """Raises ConfigError for security settings of the coordinator that belong to the cluster: whoever gives them
        expects them to take effect."""
        for name in ("tls", "cluster_token_file"):
            if getattr(self.coordinator, name) is not None:
                field = f"coordinator.{name}"
                raise ConfigError(f"{field}: has no effect in a local cluster: give {name}", field=field)

    def idle_settings(self) -> dict[str, str]:
        """The settings that the others leave without effect, with the reason. The sections tell of their own."""
        given, fixed = self.model_fields_set, self.autoscale is None
        policy = "" if fixed else "beside a policy, which has gpus_per_replica"
        why_not_of_pool = policy or ("" if self.workers is None else "beside workers")
        why_not_of_both = policy or ("without workers" if self.workers is None else "")
        return idle_among(
            autoscale_window_s=(fixed and "autoscale_window_s" in given, "without autoscale"),
            worker_gpus=(bool(why_not_of_both) and "worker_gpus" in given, why_not_of_both),
            prefill_gpus=(bool(why_not_of_pool) and "prefill_gpus" in given, why_not_of_pool),
            decode_gpus=(bool(why_not_of_pool) and "decode_gpus" in given, why_not_of_pool),
        )
