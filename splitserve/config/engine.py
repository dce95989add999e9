"""Settings of a worker's engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from splitserve.config.base import Cost, Option, Settings

MAX_ADAPTERS = 128
MAX_BYTES = 2**50
"""Of any memory or file: beyond what machines have, and within what their calls take."""
VLLM_START_S = 20.0
INHERITED_FILES = Path("/proc/self/fd")
"""Files that a process inherited, by their numbers; to open one opens it anew."""
ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")


def _folders_by_name(value: Any) -> Any:
    """The texts NAME=FOLDER as a mapping; other values unchanged."""
    if not isinstance(value, list | tuple):
        return value
    found: dict[str, str] = {}
    for text in value:
        name, mark, folder = str(text).partition("=")
        if not mark or not folder:
            raise ValueError(f"must be NAME=FOLDER, not {text!r}")
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = folder
    return found


def _checked_names(adapters: Mapping[str, Path]) -> Mapping[str, Path]:
    if len(adapters) > MAX_ADAPTERS:
        raise ValueError(f"at most {MAX_ADAPTERS} adapters, not {len(adapters)}")
    for name in adapters:
        if not ADAPTER_NAME.match(name):
            raise ValueError(f"names must have 1..128 characters of [A-Za-z0-9._-], not {name[:160]!r}")
    return adapters


def _as_texts(adapters: Mapping[str, Path]) -> tuple[str, ...]:
    return tuple(f"{name}={folder}" for name, folder in adapters.items())


Adapters = Annotated[
    Mapping[str, Path],
    BeforeValidator(_folders_by_name),
    AfterValidator(_checked_names),
    PlainSerializer(_as_texts, return_type=tuple[str, ...]),
]
"""Folders by name; also accepts the texts NAME=FOLDER."""


class EngineConfig(Settings):
    """The engine of a worker."""

    kind: Annotated[Literal["torch", "vllm", "simulated"], Option(flag="engine")] = "torch"
    """Kind of engine. `vllm`: vLLM computes, see docs/vllm.md. `simulated` takes predictable time and needs no weights;
    it is for tests of everything else."""
    engine_args: str = ""
    """vLLM's own options, in one string; see docs/vllm.md for those that are refused."""
    adapters: Annotated[Adapters, Option(flag="adapter", metavar="NAME=FOLDER")] = Field(default_factory=dict)
    """LoRA adapters of the model, each served as a model of its name: folders with `adapter_config.json` and
    `adapter_model.safetensors`, at most 128. For engine vllm; see docs/vllm.md. Default: none."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and KV, equal on all workers of a model (the simulated engine ignores it). `auto`: bfloat16; on a
    processor without instructions for it float32, unless another setting is for bfloat16 alone."""
    quantization: Literal["none", "int8"] = "none"
    """Quantization of weights, equal on all workers of a model. `int8`, on cpu only: activations are quantized per
    token, the output layer stays in bfloat16. Faster, less memory, slightly different answers; see
    docs/quantization.md."""
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """Type of KV blocks, equal on all workers of a model. `auto`: as `dtype`. `int8`: about half the bytes in memory
    and in handoffs, faster decoding of long contexts, slightly different answers; needs `dtype` bfloat16.
    Engine vllm takes none. See docs/quantization.md."""
    device: Annotated[
        str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), Option(metavar="auto|cpu|cuda[:N]")
    ] = "auto"
    """Device to compute on. `auto`: cuda if available, else cpu."""
    attention_backend: Literal["auto", "torch", "triton"] = "auto"
    """Backend of attention. `auto`: triton on cuda if installed (torch's CUDA builds include it), else torch."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """CUDA graphs for steps that decode and for short chunks of prompts. `auto`: on cuda with triton attention; the
    start takes a few seconds longer."""
    device_sampling: Literal["auto", "off"] = "auto"
    """Sampling of tokens where the logits are. `auto`: on cuda; `off`: on the host, which waits for all logits."""
    block_size_tokens: Annotated[int, Field(ge=1, le=1024), Option(flag="block-size")] = 16
    """Tokens per KV block. Of the sizes of any two workers of a model one must divide the other. vLLM on cpu takes
    multiples of 32, rounded up, and the same on all workers."""
    num_blocks: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None
    """Number of KV blocks. Default: as many as fit in `kv_memory_bytes`."""
    kv_memory_bytes: Annotated[int, Field(ge=2**16, le=MAX_BYTES)] | None = None
    """Memory for KV blocks, including the wire blocks of a narrower `wire_dtype`. Default: 1 GiB on cpu; on
    cuda what `device_memory_share` leaves."""
    device_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """On cuda, without `kv_memory_bytes` and `num_blocks`: the share of the device's total memory that this worker
    takes in all. A trial step at the start, CUDA graphs included, measures what weights and working memory take; KV
    gets the rest. For a prefill and a decode worker on one device 0.45 each."""
    device_sleep: Literal["off", "on"] = "off"
    """On cuda: whether a worker that is told to sleep gives up its KV blocks, moves its weights to main memory and
    drops its CUDA graphs, to make them again when it wakes up. Experimental. Not together with lower tiers."""
    cpu_kernels: Literal["auto", "off"] = "auto"
    """Own bfloat16 kernels on cpu. `auto`: kernels compiled at the first start compute layers, attention and whole
    decode-only steps, if there is a C++ compiler and the processor has AVX-512 BF16; otherwise torch does."""
    core_exchange: Path | None = None
    """A file that workers on one host share, in a folder of their own; made where there is none. On cpu, with own
    kernels, a worker that rests lends its cores to neighbours, one whose streams are all ahead of their TPOT targets
    rests for those that compute prompts, and either has them back within an operation of its neighbour's. Each worker
    is pinned to cores of its own (`splitserve up` does that, and has a file of its own by default: `lend_cores`)."""
    contiguous_kv_bytes: (
        Annotated[int, Field(ge=0, le=MAX_BYTES), Option(formerly="dense_rows_bytes")] | None
    ) = None
    """Memory for contiguous copies of decoding sequences' KV, on cpu, in addition to the KV blocks. Sequences that do
    not fit decode more slowly. Default: a quarter of the KV blocks' memory; 0: none. Allocated on demand. Formerly
    `dense_rows_bytes`, which is still accepted."""
    max_step_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Token budget of one step. Longer prompts are computed in chunks; the KV of each chunk is sent while the next one
    is computed. Default: 512 on cpu, 2048 on cuda."""
    max_running_requests: Annotated[int, Field(ge=1, le=65536)] = 64
    """Most sequences in one step."""
    max_waiting_requests: Annotated[int, Field(ge=1, le=10**6)] = 1024
    """Most waiting sequences; further ones are refused with RESOURCE_EXHAUSTED."""
    max_bypasses: Annotated[int, Field(ge=0, le=10**6)] = 16
    """How many later requests may bypass one that does not fit before it blocks the queue."""
    prefix_cache: bool = True
    """Keep the KV of finished prompts for later prompts with the same prefix."""
    kv_host_tier_bytes: Annotated[int, Field(ge=2**12, le=MAX_BYTES)] | None = None
    """Host memory for KV of prefixes below the KV blocks, in addition to them: what does not fit into the blocks is
    read back from there where that is sooner than computing it. Of use if it is larger than the blocks' memory. See
    docs/engine.md. Default: none."""
    kv_disk_tier_path: Path | None = None
    """A folder on a local disk for KV of prefixes that host memory does not hold, or that is to outlive the worker.
    Each worker has a file of its own there. Needs `kv_host_tier_bytes`. Default: none."""
    kv_store_master: (
        Annotated[str, Field(pattern=r"^[^\s:]+:\d{1,5}$"), Option(metavar="HOST:PORT")] | None
    ) = None
    """The master of a Mooncake Store that takes the place of the disk: KV of prefixes that host memory does not hold
    goes to the memory of the store's nodes. Needs the package `mooncake-transfer-engine-non-cuda`. Default: none."""
    kv_disk_tier_bytes: Annotated[int, Field(ge=2**14, le=MAX_BYTES)] = 2**34
    """Most bytes of a worker's file in `kv_disk_tier_path`, or of its blocks in the store of `kv_store_master`. With
    `kv_tier_sharing`: of all blocks in the folder, at least 256 blocks; or what a worker remembers of the store."""
    kv_tier_sharing: Literal["off", "on"] = "off"
    """Whether all workers that have this `kv_disk_tier_path` on one host, or this `kv_store_master`, read what any of
    them has written: those of the same model, KV dtype, layout and block size. See docs/engine.md."""
    speculation: Literal["off", "prompt-lookup", "draft-model"] = "off"
    """Drafts of next tokens, which decode steps check several at a time; answers stay the same, token for token.
    `prompt-lookup`: what followed the last tokens when they occurred before, in the prompt or the answer.
    `draft-model`: what `draft_model` says. Engine vllm takes none. See docs/engine.md."""
    draft_model: Annotated[str, Field(min_length=1, max_length=4096), Option(metavar="MODEL")] | None = None
    """A much smaller model with the vocabulary of the one that is served, for `speculation` draft-model: a name, a
    folder or a file, as the model itself. Its KV is part of `kv_memory_bytes`; prefill workers do not load it.
    Default: none."""
    context_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Most prompt plus output tokens of a request. Default and upper bound: the model's own."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compute threads. Default: the number of cores the worker may run on."""
    hung_step_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """A step that computes for this long, and for 20 times as long as expected, hangs: the worker ends with code 70, to
    be replaced. At ten times this it does in any case, also while no time is expected yet."""
    measured_memory_gb_per_s: (
        Annotated[float, Field(gt=0, le=1e6), Option(flag="measured-memory", metavar="GB/S")] | None
    ) = None
    """Memory rate of the device in GB/s, as `splitserve doctor --device` measured it. It changes nothing but the
    metrics, which then tell the share of it that steps reach, so it needs the worker's `metrics_port`. Default:
    unknown."""
    measured_matmul_tflops: (
        Annotated[float, Field(gt=0, le=1e6), Option(flag="measured-matmul", metavar="TFLOP/S")] | None
    ) = None
    """Rate of matrix products of the device in TFLOP/s, as `splitserve doctor --device` measured it; see
    `measured_memory_gb_per_s`. Default: unknown."""
    simulated_prefill_token_s: Annotated[
        float, Field(ge=0), Option(flag="simulated-prefill-token-s", hidden=True)
    ] = 20e-6
    """Simulated engine: seconds per prompt token."""
    simulated_prefill_token2_s: Annotated[
        float, Field(ge=0), Option(flag="simulated-prefill-token2-s", hidden=True)
    ] = 0.0
    """Simulated engine: seconds per squared prompt token."""
    simulated_step_s: Annotated[Cost, Option(flag="simulated-step-s", hidden=True)] = 2e-3
    """Simulated engine: least seconds of a decode step."""
    simulated_context_token_s: Annotated[
        float, Field(ge=0), Option(flag="simulated-context-token-s", hidden=True)
    ] = 0.0
    """Simulated engine: seconds per decode step for each context token in the batch."""
    simulated_sequence_s: Annotated[Cost, Option(flag="simulated-sequence-s", hidden=True)] = 50e-6
    """Simulated engine: seconds per decode step for each sequence in the batch."""

    def idle_measurements(self, silent: str) -> dict[str, tuple[bool, str]]:
        """What `idle_among` is to know of settings that only metrics tell; `silent`: why there are none, or empty."""
        given = {
            "engine__measured_memory_gb_per_s": self.measured_memory_gb_per_s,
            "engine__measured_matmul_tflops": self.measured_matmul_tflops,
        }
        return {name: (bool(silent) and rate is not None, silent) for name, rate in given.items()}

    @property
    def stop_in_start_s(self) -> float:
        """How many seconds the engine's start may go on once the worker is told to stop, to end its processes."""
        return VLLM_START_S if self.kind == "vllm" else 0.0


EngineSection = Annotated[EngineConfig, Option(panel="Engine")]
