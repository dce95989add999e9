"""Types of command-line options that several commands share.

Values are checked by the settings they become, not here, so that file and option fail with the same words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ENGINE_PANEL = "Engine"

Target = Annotated[
    str, typer.Option(envvar="SPLITSERVE_TARGET", metavar="HOST:PORT", help="The coordinator to ask.")
]
DEFAULT_TARGET = "127.0.0.1:50051"
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="SPLITSERVE_API_KEY",
        show_envvar=True,
        help="Key of the tenant who asks. Better in the environment: command lines can be read by others.",
    ),
]
TlsClient = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        envvar="SPLITSERVE_TLS",
        metavar="DIR|FILE",
        help="Encrypt: folder of `splitserve certs`, or the authority's PEM file.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]

Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="YAML file of settings; options given here win over it.")
]
Model = Annotated[
    str | None, typer.Option(help="Embedded model, folder, .gguf file, Hugging Face id, or 'simulated'.")
]
ServedModelName = Annotated[str | None, typer.Option(help="Name that clients use. Default: the model's own.")]
Tls = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Mutual TLS: folder of `splitserve certs`. Default: no encryption."),
]
ClusterTokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Secret that all parts of the cluster share.")
]
ClusterPort = Annotated[
    int | None,
    typer.Option(help="With --tls: port for workers and the autoscaler. Default: after the clients' port."),
]
Tenants = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Tenants: keys, models, quotas. Default: everybody.")
]
ModelRoute = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=MODEL:WEIGHT,...", help="Public name and the models behind it; may be given again."
    ),
]
DirectModelNames = Annotated[
    str | None,
    typer.Option(
        metavar="allow|hide", help="Whether models behind a route can be named themselves. Default: allow."
    ),
]
CircuitBreaker = Annotated[
    str | None,
    typer.Option(metavar="NAME=VALUE,...", help="Settings of the circuit breakers, as `enabled=false`."),
]
Host = Annotated[str | None, typer.Option(help="Interface to listen on. Default: 127.0.0.1.")]
GrpcPort = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one. Default: 50051.")]
HttpPort = Annotated[
    str | None,
    typer.Option(
        metavar="PORT|off", help="Port of the OpenAI-compatible API; 0 takes a free one. Default: 8000."
    ),
]
Drain = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="How long a drain may take. Default: 30.")
]
VerifyKv = Annotated[
    str | None, typer.Option(help="Checksums of arriving KV: off (default), sampled or all.")
]
WireDtype = Annotated[
    str | None,
    typer.Option(
        metavar="same|fp8_e4m3", help="Type in which KV travels; fp8_e4m3 halves it. Default: same."
    ),
]
MetricsPort = Annotated[
    int | None, typer.Option(help="Port of a Prometheus endpoint; 0 takes a free one. Default: none.")
]
ScalingInterval = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Between scaling decisions. Default: the policy's.")
]
ScalingWindow = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Latencies of so long count. Default: 60.")
]
Hidden = Annotated[float | None, typer.Option(hidden=True)]

Engine = Annotated[
    str | None, typer.Option(help="torch (default) or simulated.", rich_help_panel=ENGINE_PANEL)
]
Dtype = Annotated[
    str | None, typer.Option(help="auto (bfloat16), float32 or bfloat16.", rich_help_panel=ENGINE_PANEL)
]
Quantization = Annotated[
    str | None,
    typer.Option(
        metavar="none|int8",
        help="int8: weights in int8, on cpu; the same on all workers. Default: none.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda[:N].", rich_help_panel=ENGINE_PANEL)]
AttentionBackend = Annotated[
    str | None,
    typer.Option(help="auto (default), torch, triton or flashinfer.", rich_help_panel=ENGINE_PANEL),
]
CudaGraphs = Annotated[str | None, typer.Option(help="auto (default) or off.", rich_help_panel=ENGINE_PANEL)]
BlockSize = Annotated[
    int | None, typer.Option(help="Tokens in one KV block. Default: 16.", rich_help_panel=ENGINE_PANEL)
]
NumBlocks = Annotated[
    int | None, typer.Option(help="KV blocks in a worker's pool.", rich_help_panel=ENGINE_PANEL)
]
KvMemoryBytes = Annotated[
    int | None, typer.Option(help="Memory of a worker's KV pool.", rich_help_panel=ENGINE_PANEL)
]
CpuKernels = Annotated[
    str | None,
    typer.Option(
        help="auto | off: own kernels in bfloat16 on cpu. Default: auto.", rich_help_panel=ENGINE_PANEL
    ),
]
DenseRowsBytes = Annotated[
    int | None,
    typer.Option(
        help="Memory for decoding sequences' KV in one piece, on cpu.", rich_help_panel=ENGINE_PANEL
    ),
]
MaxStepTokens = Annotated[
    int | None, typer.Option(help="Token budget of one step. Default: 2048.", rich_help_panel=ENGINE_PANEL)
]
MaxRunningRequests = Annotated[
    int | None, typer.Option(help="Sequences in one step at most. Default: 64.", rich_help_panel=ENGINE_PANEL)
]
MaxWaitingRequests = Annotated[
    int | None, typer.Option(help="Sequences that may wait. Default: 1024.", rich_help_panel=ENGINE_PANEL)
]
MaxBypasses = Annotated[
    int | None,
    typer.Option(help="How many may overtake one that does not fit.", rich_help_panel=ENGINE_PANEL),
]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Share the KV of equal beginnings. Default: yes.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
ContextTokens = Annotated[
    int | None, typer.Option(help="Prompt plus output tokens at most.", rich_help_panel=ENGINE_PANEL)
]
Threads = Annotated[
    int | None,
    typer.Option(help="Compute threads. Default: one for each core.", rich_help_panel=ENGINE_PANEL),
]
ADMISSION_PANEL = "Admission"
Admission = Annotated[
    str | None,
    typer.Option(
        metavar="queue|off",
        help="Requests wait at the coordinator, in fair order, or at the workers. Default: queue.",
        rich_help_panel=ADMISSION_PANEL,
    ),
]
MaxQueuedRequests = Annotated[
    int | None,
    typer.Option(help="Requests of a model that may wait. Default: 1024.", rich_help_panel=ADMISSION_PANEL),
]
MaxQueuedPromptTokens = Annotated[
    int | None,
    typer.Option(help="Prompt tokens that may wait. Default: 2 Mi.", rich_help_panel=ADMISSION_PANEL),
]
MaxQueue = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Longest time in the queue. Default: 60.", rich_help_panel=ADMISSION_PANEL
    ),
]
TtftSlo = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Refuse what would miss this time to the first token. Default: none.",
        rich_help_panel=ADMISSION_PANEL,
    ),
]
TpotSlo = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Hold back what would make decode steps longer than this. Default: none.",
        rich_help_panel=ADMISSION_PANEL,
    ),
]
PrefillHorizon = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Work sent to a prefill worker in advance. Default: 0.3.",
        rich_help_panel=ADMISSION_PANEL,
    ),
]
DecodeHeadroom = Annotated[
    float | None,
    typer.Option(
        help="Share of decode kept for more urgent classes. Default: 0.1.", rich_help_panel=ADMISSION_PANEL
    ),
]
