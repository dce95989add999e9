"""A model's elementwise operations in fused kernels against its own: `python -m bench.engine.elementwise [--json]`.

Needs a CUDA device with 50 GB; under a minute. Two copies of a model of llama-3.1-8b's shapes with random weights,
whose sibling linear layers are packed: one with the fused kernels, one without, attention by the same kernels. Whole
steps of both in turns (A B B A ...), decode steps as CUDA graphs. Of each case:

* fused_ms, plain_ms: medians of a step over all turns;
* ratio: the median over the turns of plain_ms / fused_ms of the same turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch

from bench.engine.elementwise.cases import (
    BLOCK,
    ElementwiseRow,
    StepCase,
    parse_case,
    prompts_of,
    row_of,
    step_times,
    turns_of,
)
from bench.engine.processes.random_model import random_model
from bench.engine.turns import show
from bench.machine import this_machine
from engine.model.loaded_model import LoadedModel
from engine.model.sibling_linears import PackedSlice
from engine.runner.device import choose_device
from engine.runner.torch_runner import TorchRunner, make_torch_runner
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError, UnavailableError
from splitserve.logs import configure_logging

MODEL = "bench/random_models/llama-3.1-8b"
CASES = ("decode:1x1024", "decode:32x1024", "prefill:128", "prefill:512", "prefill:2048")
TURNS = 8
SECONDS_A_TURN = 0.15
"""Of one kind's steps of one case."""


def time_case(case: StepCase, fused: TorchRunner, plain: TorchRunner, turns: int) -> ElementwiseRow:
    """Times one case, after a turn that is not counted."""
    runners = {True: fused, False: plain}
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
        max_running_requests=max(case.batch for case in cases),
        prefix_cache=False,
    )


def parts_of(model: LoadedModel) -> tuple[int, int]:
    """How many modules of a model have fused kernels, and how many linear layers share a product."""
    from engine.backends.cuda.fused.forward import FusedForward  # needs triton

    modules = list(model.module.modules())
    fused = sum(isinstance(vars(part).get("forward"), FusedForward) for part in modules)
    return fused, sum(isinstance(part, PackedSlice) for part in modules)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each case, as a table, or one JSON object with `--json`. Returns 2 without a CUDA device."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.elementwise", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--model", default=MODEL, help="a folder with a config.json")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--case", nargs="+", type=parse_case, default=[parse_case(name) for name in CASES])
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if choose_device(options.device).type != "cuda":
            raise UnavailableError(f"it compares kernels for CUDA devices, {options.device} is none")
    except (ConfigError, UnavailableError) as error:
        print(f"bench.engine.elementwise: {error.message}", file=sys.stderr)
        return 2
    configure_logging("bench")
    config = settings_of(options.case, options.device)
    models = [random_model(options.model, config, fusible=fusible) for fusible in (True, False)]
    fused, plain = (make_torch_runner(model, config) for model in models)
    used, packed = parts_of(models[0])
    if not used:
        print("bench.engine.elementwise: no fused kernel is in use; the log says why", file=sys.stderr)
        return 1
    rows = [asdict(time_case(case, fused, plain, options.turns)) for case in options.case]
    load = {
        "device": torch.cuda.get_device_name(options.device),
        "fused_modules": used,
        "packed_linears": packed,
        "turns": options.turns,
    }
    show(
        "elementwise",
        sys.argv[1:] if arguments is None else arguments,
        this_machine(),
        rows,
        as_json=options.json,
        **load,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
