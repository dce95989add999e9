"""Settings of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from splitserve.config.base import BASIC, CoordinatorAddress, Option, Port, idle_among
from splitserve.config.engine import EngineConfig, EngineForModel
from splitserve.config.gpu_list import Gpus
from splitserve.config.security import CeilingConfig, SecuritySettings
from splitserve.config.tracing import IDLE_AUTHORITY, TracingConfig
from splitserve.core_list import Cores


class WorkerConfig(SecuritySettings, EngineForModel):
    """One worker: prompts, tokens or both, as its role says."""

    worker_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$"), BASIC]
    """Name of the worker, stable across restarts. Default: KIND-HOSTNAME-PID."""
    model: Annotated[str, BASIC]
    """Embedded model's name, folder, GGUF file or Hugging Face id. "simulated" needs no files."""
    served_model_name: str | None = None
    """Model name for clients. Default: the model's own short name."""
    host: Annotated[str, BASIC] = "127.0.0.1"
    """Interface to listen on."""
    port: Annotated[Port, BASIC] = 0
    """Port to listen on; 0 takes a free one."""
    advertise_address: Annotated[str | None, Option(metavar="HOST:PORT", tier="basic")] = None
    """Address, "host:port", reported to coordinators. It must lead to this very process and not to a load balancer:
    refused connections count as proof that the process has ended. Default: host and the bound port."""
    coordinators: Annotated[
        tuple[CoordinatorAddress, ...], Option(flag="coordinator", metavar="HOST:PORT", tier="basic")
    ] = ()
    """Address, "host:port", of each coordinator to register with."""
    transport: Literal["nixl", "ucx"] = "nixl"
    """Transport of KV between workers, equal on all workers of a model. `ucx` needs `pip install 'splitserve[ucx]'`."""
    expected_lane_gb_per_s: (
        Annotated[float, Field(ge=0, le=10_000), Option(flag="expected-lane", metavar="GB/S")] | None
    ) = None
    """Prefill workers: expected speed of the lane to a decode worker in GB/s; 0 disables the check. Default: a peer on
    this machine, or on another if this one has RDMA devices, must be reached without TCP and at 0.5 GB/s or more;
    between CUDA devices of this machine at 6 GB/s or more."""
    lane_policy: Literal["warn", "refuse"] = "warn"
    """Treatment of a lane that is slower than expected: log a warning, or do not use the pair."""
    verify_kv: Literal["auto", "off", "sampled", "all"] = "auto"
    """Decode workers: verify checksums of received KV blocks before a sequence is admitted: `sampled` of one block in
    16, `all` of each. `auto`: `sampled` where KV lies in host memory, `off` in a GPU's, where it has to be copied
    first."""
    lease_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Decode workers: how long a coordinator's requests go on after its output stream has broken, for it to resume
    them."""
    quarantine_s: Annotated[float, Field(gt=0, le=7200)] = 45.0
    """How long aborted blocks wait for their writer before it is fenced; longer than the lease."""
    ticket_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Longest time from a reservation to its last write; a prompt that waits or computes longer is tried again.
    Blocks of a writer that was stopped, or lost with its machine, become free 10 s after that."""
    role: Annotated[Literal["prefill", "decode", "both"], BASIC] = "both"
    """What the worker does for requests at first: `prefill` computes prompts, `decode` streams tokens. The autoscaler
    may change it while the worker runs, except with engine vllm, which also cannot do both. `splitserve prefill-worker`
    and `decode-worker` give the role that they name."""
    standby: bool = False
    """Stay out of rotation, loaded and connected, until an autoscaler's plan activates the worker."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """How long to wait for running requests after SIGTERM."""
    heartbeat_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """Time between load reports to the coordinators."""
    metrics_port: Port | None = None
    """Port of a Prometheus endpoint on `host`; 0 takes a free one. Default: no endpoint."""
    gpus: Annotated[Gpus, Option(metavar="GPUS", env="SPLITSERVE_GPU", tier="basic")] = ()
    """GPUs of this worker, for example "2,3": numbers as `nvidia-smi -L` prints them, UUIDs, or the UUID of one MIG
    slice. They become cuda:0, cuda:1, and so on; the others stay in view behind them, for transfers over NVLink. vLLM
    takes as many as its tensor parallel size, which follows from them unless it is given; the torch engine takes one.
    Default: what `engine.device` says."""
    nics: Literal["any", "nearest"] = "any"
    """RDMA ports that UCX may use: `nearest` pins the worker to the active ports nearest to its GPUs on the PCI bus,
    by UCX_NET_DEVICES unless that is set. `any`: UCX chooses."""
    cpus: Annotated[Cores, Option(metavar="CORES")] = ()
    """Cores to run on, for example "0,1" or "0-3". Default: all that the process may use."""
    spot_file: Path | None = None
    """File whose existence is a notice that the worker's machine is taken away; see docs/guides/operations.md. It is
    empty, or has the time as `2026-01-31T08:22:00Z`. Default: SIGUSR1 alone is such a notice."""
    spot_notice_s: Annotated[float, Field(gt=0, le=86400)] = 30.0
    """Time from a notice that names none, SIGUSR1 or an empty file, until the machine is taken away. AWS gives 120 s,
    Azure and Google Cloud 30 s."""
    ceilings: CeilingConfig = CeilingConfig()
    """Section `ceilings`."""
    tracing: TracingConfig = TracingConfig()
    """Section `tracing`."""
    engine: EngineConfig = EngineConfig()
    """Section `engine`."""

    def idle_settings(self) -> dict[str, str]:
        """The settings that the others leave without effect, with the reason."""
        return idle_among(tracing__authority=(self.tracing.has_idle_authority, IDLE_AUTHORITY))
