"""A model's elementwise operations in fused kernels against its own: `python -m bench.engine.elementwise [--json]`.

Needs a CUDA device with 50 GB; under a minute. Two copies of a model of llama-3.1-8b's shapes with random weights,
whose sibling linear layers are packed: one with the fused kernels, one without, attention by the same kernels. Whole
steps of both in turns (A B B A ...), decode steps as CUDA graphs. Of each case:

* fused_ms, plain_ms: medians of a step over all turns;
* ratio: the median over the turns of plain_ms / fused_ms of the same turn.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, count
from statistics import median

import torch

from bench.engine.processes.random_model import random_model
from bench.engine.turns import GREEDY, TOKENS, show
from bench.machine import this_machine
from engine.core.types import ScheduledSequence
from engine.model.loaded_model import LoadedModel
from engine.model.sibling_linears import PackedSlice
from engine.runner.device import choose_device
from engine.runner.torch_runner import TorchRunner, make_torch_runner
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError, UnavailableError

MODEL = "bench/random_models/llama-3.1-8b"
CASES = ("decode:1x1024", "decode:32x1024", "prefill:128", "prefill:512", "prefill:2048")
BLOCK = 16
TURNS = 8
SECONDS_A_TURN = 0.15
"""Of one kind's steps of one case."""
CHUNK_TOKENS = 2048
_TABLES = count(1)


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of one step: `batch` that decode after `tokens`, or one whose prompt of `tokens` is computed."""

    name: str
    batch: int
    tokens: int
    decodes: bool

    @property
    def num_blocks(self) -> int:
        """KV blocks of all sequences."""
        return self.batch * -(-self.tokens // BLOCK)

    def sequences(self) -> list[ScheduledSequence]:
        """As a scheduler would have them; blocks are in no order, as after hours of service."""
        pick = random.Random(0)
        blocks = pick.sample(range(self.num_blocks), self.num_blocks)
        each = self.num_blocks // self.batch
        return [
            ScheduledSequence(
                f"{self.name}-{index}",
                [pick.choice(TOKENS) for _ in range(self.tokens)],
                self.tokens - 1 if self.decodes else self.tokens,
                self.tokens - 1 if self.decodes else 0,
                1 if self.decodes else self.tokens,
                blocks[index * each : (index + 1) * each],
                True,
                GREEDY,
                table_id=next(_TABLES),
            )
            for index in range(self.batch)
        ]


def prompts_of(steps: Sequence[ScheduledSequence]) -> Iterator[ScheduledSequence]:
    """Steps that write the KV that these read, a chunk of one sequence each."""
    for step in steps:
        for start in range(0, step.num_computed, CHUNK_TOKENS):
            new = min(CHUNK_TOKENS, step.num_computed - start)
            yield step._replace(num_computed=start, num_new=new, sample=False)


def parse_case(text: str) -> Case:
    """`decode:BATCHxCONTEXT` or `prefill:TOKENS`. Raises argparse.ArgumentTypeError."""
    phase, _, sizes = text.partition(":")
    batch, _, tokens = sizes.rpartition("x") if phase == "decode" else ("1", "", sizes)
    numbers = [int(part) if part.isdecimal() else 0 for part in (batch, tokens)]
    if phase not in ("decode", "prefill") or min(numbers) < 1 or max(numbers) > 1 << 16:
        raise argparse.ArgumentTypeError(f"{text} is neither decode:BATCHxCONTEXT nor prefill:TOKENS")
    return Case(text, numbers[0], numbers[1], phase == "decode")


def turns_of(count: int) -> Iterator[tuple[bool, ...]]:
    """Whether fused, in the order of each turn: A B, B A, A B, ..."""
    for turn in range(count):
        yield (True, False) if turn % 2 == 0 else (False, True)


@dataclass(frozen=True, slots=True)
class ElementwiseRow:
    """One case; see the module. `steps`: of each kind."""

    case: str
    steps: int
    fused_ms: float
    plain_ms: float
    ratio: float


def row_of(
    case: str, fused_s: Sequence[Sequence[float]], plain_s: Sequence[Sequence[float]]
) -> ElementwiseRow:
    """From each kind's step times, by turn."""
    ratios = [median(plain) / median(fused) for fused, plain in zip(fused_s, plain_s, strict=True)]
    return ElementwiseRow(
        case=case,
        steps=sum(map(len, fused_s)),
        fused_ms=round(median(chain.from_iterable(fused_s)) * 1e3, 3),
        plain_ms=round(median(chain.from_iterable(plain_s)) * 1e3, 3),
        ratio=round(median(ratios), 3),
    )


def step_times(
    step: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Of steps one after the other for so long, at least two."""
    times: list[float] = []
    began = clock()
    while len(times) < 2 or clock() - began < seconds:
        before = clock()
        step()
        times.append(clock() - before)
    return times


def time_case(case: Case, fused: TorchRunner, plain: TorchRunner, turns: int) -> ElementwiseRow:
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


def settings_of(cases: Sequence[Case], device: str) -> EngineConfig:
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
