"""Settings of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from splitserve.addresses import check_address
from splitserve.config.base import CoordinatorAddress, Option, Port, Settings, idle_among
from splitserve.config.engine import EngineConfig, EngineSection
from splitserve.config.faults import Faults
from splitserve.config.gpu_list import Gpus
from splitserve.config.security import CeilingConfig, SecuritySettings
from splitserve.config.tracing import IDLE_AUTHORITY, TracingConfig
from splitserve.core_list import Cores

SpotProvider = Literal["aws", "gcp", "azure"]


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.path.strip("/") or parts.query or "@" in parts.netloc:
        raise ValueError("it is written http://HOST:PORT")
    host = parts.netloc if parts.port else f"{parts.netloc}:80"
    check_address(host, "spot.metadata_url")
    return f"http://{host}"


class SpotNoticeConfig(Settings):
    """Notices that the worker's machine is taken away; see docs/operations.md. SIGUSR1 is always one."""

    provider: Annotated[SpotProvider | None, Option(flag="spot-provider")] = None
    """The cloud whose metadata server is asked for notices. Default: none is asked."""
    metadata_url: (
        Annotated[str, AfterValidator(_checked_url), Option(flag="spot-metadata-url", metavar="URL")] | None
    ) = None
    """With `provider`: where its metadata server is. Default: where the cloud has it."""
    file: Annotated[Path | None, Option(flag="spot-file")] = None
    """File that is a notice once it exists. It is empty, or has the time as `2026-01-31T08:22:00Z`. Default: none."""
    notice_s: Annotated[float, Field(gt=0, le=86400), Option(flag="spot-notice")] = 30.0
    """Time from a notice that names none until the machine is taken away: SIGUSR1, an empty file, and GCP's."""
    poll_s: Annotated[float, Field(ge=0.05, le=60), Option(flag="spot-poll")] = 2.0
    """Time between two looks for a notice."""


class WorkerConfig(SecuritySettings):
    """One prefill, decode or neutral worker."""

    worker_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """Name of the worker, stable across restarts. Default: KIND-HOSTNAME-PID."""
    model: str
    """Embedded model's name, local folder, GGUF file or Hugging Face id; "simulated" needs no files."""
    served_model_name: str | None = None
    """Model name for clients. Default: the model's own short name."""
    host: str = "127.0.0.1"
    """Interface to listen on."""
    port: Port = 0
    """Port to listen on; 0 takes a free one."""
    advertise_address: Annotated[str | None, Option(metavar="HOST:PORT")] = None
    """Address, "host:port", reported to coordinators. It must lead to this very process and not to a load balancer:
    refused connections count as proof that the process has ended. Default: host and the bound port."""
    coordinators: Annotated[
        tuple[CoordinatorAddress, ...], Option(flag="coordinator", metavar="HOST:PORT")
    ] = ()
    """Address, "host:port", of each coordinator to register with."""
    transport: Literal["nixl", "ucx", "memory"] = "nixl"
    """Transport of KV between workers, equal on all workers of a model. `ucx` needs `pip install 'splitserve[ucx]'`;
    `memory` works within one process only (tests)."""
    faults: Faults = None
    """Section `faults`, for tests only: faults injected into this worker's KV transfer. Default: none."""
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
    wire_dtype: Literal["same", "fp8_e4m3"] = "same"
    """Type in which KV travels, equal on all workers of a model. `fp8_e4m3` sends half the bytes of bfloat16, changes
    answers slightly and needs additional memory of half the KV blocks' size; see docs/transports.md."""
    lease_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Decode workers: how long a coordinator's requests go on after its output stream has broken, for it to resume
    them."""
    quarantine_s: Annotated[float, Field(gt=0, le=7200)] = 45.0
    """How long aborted blocks wait for their writer before it is fenced; longer than the lease."""
    ticket_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Longest time from a reservation to its last write; a prompt that waits or computes longer is tried again.
    Blocks of a writer that was stopped, or lost with its machine, become free 10 s after that."""
    leaning: Literal["prefill", "decode"] = "prefill"
    """Neutral workers: the pool to lean to at first. Coordinators may change it while the worker runs."""
    replica_class: Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?)?$")] = ""
    """Class of replicas, as the autoscaler's policy names it, 32 characters at most; see docs/autoscaling.md.
    Default: the policy's first one."""
    standby: bool = False
    """Stay out of rotation, loaded and connected, until an autoscaler's plan activates the worker."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """How long to wait for running requests after SIGTERM."""
    heartbeat_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """Time between load reports to the coordinators."""
    peer_fetch: Literal["on", "off"] = "off"
    """Whether a prefill or decode worker gives prefixes of its cache to other workers and takes theirs, where its
    coordinator has `peer_fetch: on`; see docs/routing.md. Neutral workers do in any case; engine vllm, and workers
    without a prefix cache, do not."""
    weights_from: Literal["disk", "peer", "auto"] = "disk"
    """Where a worker that starts gets its model's weights. `peer`: from a worker of the model that runs and has
    `give_weights_gb_per_s`, over `transport`; from files where that fails. `auto`: the same, where no files of weights
    are on this machine. Configuration and tokenizer come from files in any case. For engine torch; see
    docs/engine.md."""
    give_weights_gb_per_s: (
        Annotated[float, Field(ge=0.001, le=10_000), Option(flag="give-weights", metavar="GB/S")] | None
    ) = None
    """Most GB/s at which this worker sends its weights to one that starts, one at a time; less is taken from what it
    serves the lower it is. Default: it gives none."""
    metrics_port: Port | None = None
    """Port of a Prometheus endpoint on `host`; 0 takes a free one. Default: no endpoint."""
    gpus: Annotated[Gpus, Option(metavar="GPUS", env="SPLITSERVE_GPU")] = ()
    """GPUs of this worker, for example "2,3": numbers as `nvidia-smi -L` prints them, UUIDs, or the UUID of one MIG
    slice. They become cuda:0, cuda:1, and so on; the others stay in view behind them, for transfers over NVLink. vLLM
    takes as many as its tensor parallel size, which follows from them unless it is given; the torch engine takes one.
    Default: what `engine.device` says."""
    nics: Literal["any", "nearest"] = "any"
    """RDMA ports that UCX may use: `nearest` pins the worker to the active ports nearest to its GPUs on the PCI bus,
    by UCX_NET_DEVICES unless that is set. `any`: UCX chooses."""
    cpus: Annotated[Cores, Option(metavar="CORES")] = ()
    """Cores to run on, for example "0,1" or "0-3". Default: all that the process may use."""
    spot: Annotated[SpotNoticeConfig, Option(panel="Spot")] = SpotNoticeConfig()
    """Section `spot`."""
    ceilings: CeilingConfig = CeilingConfig()
    """Section `ceilings`."""
    tracing: Annotated[TracingConfig, Option(panel="Tracing")] = TracingConfig()
    """Section `tracing`."""
    engine: EngineSection = EngineConfig()
    """Section `engine`."""

    def idle_settings(self, *, is_neutral: bool) -> dict[str, str]:
        """The settings that the others, or the kind of worker, leave without effect, with the reason."""
        pinned = "leaning" in self.model_fields_set and not is_neutral
        silent = "without metrics_port" if self.metrics_port is None else ""
        no_provider = self.spot.metadata_url is not None and self.spot.provider is None
        return idle_among(
            leaning=(pinned, "but on a neutral worker"),
            spot__metadata_url=(no_provider, "without spot.provider"),
            tracing__authority=(self.tracing.has_idle_authority, IDLE_AUTHORITY),
            **self.engine.idle_measurements(silent),
        )

    @property
    def trades_prefixes(self) -> bool:
        """Whether a pinned worker gives prefixes and takes them: it is to, and its engine can."""
        return self.peer_fetch == "on" and self.engine.kind != "vllm" and self.engine.prefix_cache
