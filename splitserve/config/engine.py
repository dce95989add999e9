"""Settings of a worker's engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from splitserve.config.base import BASIC, INTERNAL, Cost, Option, Settings

MAX_ADAPTERS = 128
MAX_BYTES = 2**50
"""Bound of any size of memory or file: more than machines have, and within what system calls accept."""
VLLM_START_S = 20.0
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


Adapters = Annotated[
    Mapping[str, Path],
    BeforeValidator(_folders_by_name),
    AfterValidator(_checked_names),
    PlainSerializer(
        lambda adapters: tuple(f"{name}={folder}" for name, folder in adapters.items()),
        return_type=tuple[str, ...],
    ),
]
"""Folders by name; also accepts the texts NAME=FOLDER."""


class EngineConfig(Settings):
    """The engine of a worker."""

    kind: Annotated[Literal["torch", "vllm", "simulated"], Option(flag="engine", tier="basic")] = "torch"
    """Kind of engine. `vllm`: vLLM computes, see docs/guides/models-and-engines.md; the default of `up` on a machine
    with GPUs and vLLM. `simulated` takes predictable time and needs no weights; it is for tests of everything else."""
    engine_args: str = ""
    """vLLM's own options, in one string; see docs/guides/models-and-engines.md for those that are refused."""
    adapters: Annotated[Adapters, Option(flag="adapter", metavar="NAME=FOLDER")] = Field(default_factory=dict)
    """LoRA adapters of the model, each served as a model of its name: folders with `adapter_config.json` and
    `adapter_model.safetensors`, at most 128. For engine vllm; see docs/guides/models-and-engines.md. Default: none."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and KV, equal on all workers of a model (the simulated engine ignores it). `auto`: bfloat16; on a
    processor without instructions for it float32."""
    device: Annotated[
        str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), Option(metavar="auto|cpu|cuda[:N]", tier="basic")
    ] = "auto"
    """Device to compute on. `auto`: cuda if available, else cpu."""
    attention_backend: Literal["auto", "torch", "triton"] = "auto"
    """Backend of attention. `auto`: triton on cuda if installed (torch's CUDA builds include it), else torch."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """CUDA graphs for steps that only decode. `auto`: on cuda with triton attention; the start takes a few seconds
    longer."""
    block_size_tokens: Annotated[int, Field(ge=1, le=1024), Option(flag="block-size")] = 16
    """Tokens per KV block, equal on all workers of a model. vLLM on cpu takes multiples of 32, rounded up."""
    num_blocks: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None
    """Number of KV blocks. Default: as many as fit in `kv_memory_bytes`."""
    kv_memory_bytes: Annotated[int, Field(ge=2**16, le=MAX_BYTES), BASIC] | None = None
    """Memory for KV blocks. Default: 1 GiB on cpu; on cuda what `device_memory_share` leaves."""
    device_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """On cuda, without `kv_memory_bytes` and `num_blocks`: the share of the device's total memory that this worker
    takes in all. A trial step at the start, CUDA graphs included, measures what weights and working memory take; KV
    gets the rest. For a prefill and a decode worker on one device 0.45 each."""
    cpu_kernels: Literal["auto", "off"] = "auto"
    """Own bfloat16 kernels on cpu. `auto`: kernels compiled at the first start compute layers, attention and whole
    decode-only steps, if there is a C++ compiler and the processor has AVX-512 BF16; otherwise torch does."""
    max_step_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Token budget of one step. Longer prompts are computed in chunks; the KV of each chunk is sent while the next one
    is computed. Default: 512 on cpu, 2048 on cuda."""
    max_running_requests: Annotated[int, Field(ge=1, le=65536), BASIC] = 64
    """Most sequences in one step."""
    max_waiting_requests: Annotated[int, Field(ge=1, le=10**6)] = 1024
    """Most waiting sequences; further ones are refused with RESOURCE_EXHAUSTED."""
    max_bypasses: Annotated[int, Field(ge=0, le=10**6), INTERNAL] = 16
    """How many later requests may bypass one that does not fit before it blocks the queue."""
    token_spread: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Engine vllm with speculative decoding: the tokens that a step brings of an answer are put out one by one, over
    this share of the time that the step took. 0: at once."""
    prefix_cache: bool = True
    """Keep the KV of finished prompts for later prompts with the same prefix."""
    context_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Most prompt plus output tokens of a request. Default and upper bound: the model's own."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compute threads. Default: the number of cores the worker may run on."""
    hung_step_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """A step that computes for this long, and for 20 times as long as expected, hangs: the worker ends with code 70, to
    be replaced. At ten times this it does in any case, also while no time is expected yet."""
    simulated_prefill_token_s: Annotated[Cost, Option(flag="simulated-prefill-token-s", tier="internal")] = (
        20e-6
    )
    """Simulated engine: seconds per prompt token."""
    simulated_prefill_token2_s: Annotated[
        Cost, Option(flag="simulated-prefill-token2-s", tier="internal")
    ] = 0.0
    """Simulated engine: seconds per squared prompt token."""
    simulated_step_s: Annotated[Cost, Option(flag="simulated-step-s", tier="internal")] = 2e-3
    """Simulated engine: least seconds of a decode step."""
    simulated_context_token_s: Annotated[Cost, Option(flag="simulated-context-token-s", tier="internal")] = (
        0.0
    )
    """Simulated engine: seconds per decode step for each context token in the batch."""
    simulated_sequence_s: Annotated[Cost, Option(flag="simulated-sequence-s", tier="internal")] = 50e-6
    """Simulated engine: seconds per decode step for each sequence in the batch."""

    @property
    def stop_in_start_s(self) -> float:
        """How many seconds the engine's start may go on once the worker is told to stop, to end its processes."""
        return VLLM_START_S if self.kind == "vllm" else 0.0


SIMULATED = "simulated"
"""The name of a model without files, and the kind of engine that serves it."""


class EngineForModel(Settings):
    """Base of settings with a `model` and a section `engine`: the model "simulated" has an engine of its own."""

    @model_validator(mode="before")
    @classmethod
    def _simulated_model(cls, values: Any) -> Any:
        engine = values.get("engine", {}) if isinstance(values, dict) else None
        if isinstance(engine, dict) and values.get("model") == SIMULATED:
            if engine.get("kind", SIMULATED) != SIMULATED:
                raise ValueError('the model "simulated" is served by engine simulated alone')
            return values | {"engine": engine | {"kind": SIMULATED}}
        return values
