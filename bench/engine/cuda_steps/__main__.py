"""Steps with fused elementwise kernels, or CUDA graphs, and without: `python -m bench.engine.cuda_steps [--json]`.

Needs a CUDA device with 50 GB; under a minute. A model of llama-3.1-8b's shapes with random weights, whose sibling
linear layers are packed. `--without fused` takes two copies of it, one with the fused kernels and one without; both
have attention by the same kernels, and graphs. `--without graphs` takes one, whose steps are replayed or not. Whole
steps of both in turns (A B B A ...). Of each case:

* with_ms, without_ms: medians of a step over all turns;
* ratio: the median over the turns of without_ms / with_ms of the same turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch

from bench.engine.cuda_steps.cases import (
    BLOCK,
    StepCase,
    StepRow,
    parse_case,
    prompts_of,
    row_of,
    step_times,
    turns_of,
)
from bench.engine.processes.random_model import random_model
from bench.engine.turns import show
from bench.machine import this_machine
from bench.option_values import positive_whole
from engine.backends.cuda.staging import StepSize
from engine.model.loaded_model import LoadedModel
from engine.model.sibling_linears import PackedSlice
from engine.runner.device import choose_device
from engine.runner.torch_runner import TorchRunner, make_torch_runner
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError, UnavailableError
from splitserve.logs import configure_logging

MODEL = "bench/random_models/llama-3.1-8b"
CASES = {
    "fused": ("decode:1x1024", "decode:32x1024", "prefill:128", "prefill:512", "prefill:2048"),
    "graphs": (
        "prefill:32",
        "prefill:128",
        "prefill:512",
        "prefill:640",
        "mixed:8x1024+64",
        "mixed:32x1024+256",
    ),
}
"""By what is left out."""
TURNS = 8
SECONDS_A_TURN = 0.15
"""Of one kind's steps of one case."""


def time_case(case: StepCase, with_it: TorchRunner, without: TorchRunner, turns: int) -> StepRow:
    """Times one case, after a turn that is not counted."""
    runners = {True: with_it, False: without}
    steps = case.sequences()
    for runner in runners.values():
        for prompt in prompts_of(steps):
            runner.execute([prompt])
    times: dict[bool, list[list[float]]] = {True: [], False: []}
    for order in turns_of(turns + 1):
        for kind in order:
            times[kind].append(step_times(partial(runners[kind].execute, steps), SECONDS_A_TURN))
    return row_of(case.name, times[True][1:], times[False][1:])


def settings_of(cases: Sequence[StepCase], device: str) -> EngineConfig:
    """With KV for the largest case, and graphs for the largest batch."""
    return EngineConfig(
        dtype="bfloat16",
        device=device,
        block_size_tokens=BLOCK,
        num_blocks=max(case.num_blocks for case in cases),
        max_running_requests=max(case.num_sequences for case in cases),
        prefix_cache=False,
    )


def parts_of(model: LoadedModel) -> tuple[int, int]:
    """How many modules of a model have fused kernels, and how many linear layers share a product."""
    from engine.backends.cuda.fused.forward import FusedForward  # needs triton

    modules = list(model.module.modules())
    fused = sum(isinstance(vars(part).get("forward"), FusedForward) for part in modules)
    return fused, sum(isinstance(part, PackedSlice) for part in modules)


def graphs_of(runner: TorchRunner) -> list[StepSize]:
    """The sizes that a runner has graphs for."""
    from engine.backends.cuda.forward import CudaForward  # needs triton

    forward = runner._forward
    return forward.graph_sizes if isinstance(forward, CudaForward) else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each case, as a table, or one JSON object with `--json`. Returns 2 without a CUDA device."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.cuda_steps", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--model", default=MODEL, help="a folder with a config.json")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--without", choices=list(CASES), default="fused")
    parser.add_argument("--case", nargs="+", type=parse_case)
    parser.add_argument("--turns", type=positive_whole, default=TURNS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if choose_device(options.device).type != "cuda":
            raise UnavailableError(f"it compares kernels for CUDA devices, {options.device} is none")
    except (ConfigError, UnavailableError) as error:
        print(f"bench.engine.cuda_steps: {error.message}", file=sys.stderr)
        return 2
    configure_logging("bench")
    cases = options.case or [parse_case(name) for name in CASES[options.without]]
    config = settings_of(cases, options.device)
    found: dict[str, object]
    if options.without == "fused":
        models = [random_model(options.model, config, fusible=fusible) for fusible in (True, False)]
        runners = [make_torch_runner(model, config) for model in models]
        used, packed = parts_of(models[0])
        found = {"fused_modules": used, "packed_linears": packed}
    else:
        model = random_model(options.model, config)
        runners = [
            make_torch_runner(model, config.model_copy(update={"cuda_graphs": way}))
            for way in ("auto", "off")
        ]
        used = len(graphs_of(runners[0]))
        found = {"graphs": used}
    if not used:
        print(f"bench.engine.cuda_steps: no {options.without} in use; the log says why", file=sys.stderr)
        return 1
    rows = [asdict(time_case(case, runners[0], runners[1], options.turns)) for case in cases]
    load = {"device": torch.cuda.get_device_name(options.device), "turns": options.turns, **found}
    show(
        "cuda_steps",
        sys.argv[1:] if arguments is None else arguments,
        this_machine(),
        rows,
        as_json=options.json,
        **load,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
