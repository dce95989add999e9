"""Cost and savings of narrower KV on the wire: `python -m bench.handoff.narrow_kv`.

Parity. Prompts of English text (the topics of Python's own `pydoc`) are computed in bfloat16; greedy decoding goes on
from that KV, and from the same KV after the way through fp8 that a handoff takes (`pack`, `unpack`). All prompts
decode in one batch of one shape, so nothing but the KV differs.

* greedy_share: tokens that are equal until the first different one, of all tokens; mean of the prompts.
* next_token_share: equal likeliest tokens after equal text (the bfloat16 run's), of all positions.
* kl_mean, kl_max: Kullback-Leibler divergence from the bfloat16 run's whole distribution, of the first token that
  decode computes, in nats. logprob_difference: of that run's likeliest token.
* The row "float32" puts the same questions to the model in float32: how much bfloat16 itself changes.

Cost. `pack_ms` and `unpack_ms` on one thread, and `bench.handoff` with both wire types: bytes, and exposed_ms, which
contains what of packing and unpacking the prompt's computation does not hide.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import pydoc_data.topics
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any, Literal

import torch
from rich.console import Console

from bench.handoff import phases as handoff
from bench.machine import report, this_machine
from bench.option_values import whole_number
from engine.core.model_runner import ModelRunner
from engine.core.types import SampledToken, SamplingParams, ScheduledSequence
from engine.runner.torch_runner import build_torch_runner
from kv_transfer.layout import FP8_E4M3
from splitserve.config.cluster import ClusterConfig
from splitserve.config.engine import EngineConfig
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import resolve_model

PROMPTS = 40
PROMPT_TOKENS = (50, 120, 250, 500, 900)
STEPS = 32
BLOCK_TOKENS = 16
EXPOSED_LENGTHS = (512, 2000)
EXPOSED_REPEATS = 8
TIMES = 9
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Prompt:
    """A prompt and its KV blocks, which also hold the answer."""

    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]

    @property
    def own_blocks(self) -> tuple[int, ...]:
        """Blocks that a handoff sends."""
        return self.blocks[: -(-len(self.token_ids) // BLOCK_TOKENS)]


@dataclass(frozen=True)
class Decoded:
    """Each prompt's tokens from the second output token on, and all tokens' log-probabilities at that one."""

    tokens: list[list[int]]
    logprobs: list[dict[int, float]]


@dataclass(frozen=True)
class Parity:
    """How close a run is to the bfloat16 run; see the module docstring."""

    compared: str
    greedy_share: float
    whole_answers_share: float
    next_token_share: float
    kl_mean: float
    kl_max: float
    logprob_difference_mean: float
    logprob_difference_max: float


def texts(model: str, count: int) -> list[Prompt]:
    """Prompts of different texts and lengths."""
    tokenizer = load_tokenizer(resolve_model(model).tokenizer_source)
    prompts: list[Prompt] = []
    free = 0
    for text in sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)[:count]:
        tokens = tuple(tokenizer.encode(text)[: PROMPT_TOKENS[len(prompts) % len(PROMPT_TOKENS)]])
        blocks = -(-(len(tokens) + STEPS + 1) // BLOCK_TOKENS)
        prompts.append(Prompt(tokens, tuple(range(free, free + blocks))))
        free += blocks
    return prompts


def a_runner(model: str, dtype: str, num_blocks: int, wire_dtype: str) -> ModelRunner:
    """An engine's runner on all cores."""
    values = {"dtype": dtype, "num_blocks": num_blocks, "block_size_tokens": BLOCK_TOKENS}
    config = EngineConfig.model_validate(values)
    return build_torch_runner(config, resolve_model(model), lambda _share: None, wire_dtype)


def prefill(runner: ModelRunner, prompts: Sequence[Prompt]) -> list[int]:
    """Computes the prompts, one after the other; their first output tokens."""
    return [_execute(runner, [(prompt, prompt.token_ids, 0)], GREEDY)[0].token_id for prompt in prompts]


def decode(
    runner: ModelRunner,
    prompts: Sequence[Prompt],
    first: Sequence[int],
    forced: Sequence[Sequence[int]] | None = None,
) -> Decoded:
    """`STEPS` greedy steps of all prompts together; with `forced`, each step continues from those tokens."""
    decoded = Decoded([[] for _ in prompts], [])
    for step in range(STEPS):
        behind = decoded.tokens if forced is None else forced
        rows = [
            (prompt, (*prompt.token_ids, token, *answer[:step]), len(prompt.token_ids) + step)
            for prompt, token, answer in zip(prompts, first, behind, strict=True)
        ]
        every = SamplingParams(temperature=0.0, logprobs=runner.facts.vocabulary_size)
        sampled = _execute(runner, rows, every if step == 0 else GREEDY)
        for tokens, chosen in zip(decoded.tokens, sampled, strict=True):
            tokens.append(chosen.token_id)
        decoded.logprobs.extend(dict(chosen.logprob.top) for chosen in sampled if chosen.logprob is not None)
    return decoded


def compare(name: str, base: Decoded, free: Decoded, forced: Decoded) -> Parity:
    """Compares a free run, and one forced to the bfloat16 run's tokens."""
    pairs = list(zip(base.tokens, free.tokens, strict=True))
    equal = [next((n for n, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), STEPS) for pair in pairs]
    next_tokens = [
        a == b
        for expected, got in zip(base.tokens, forced.tokens, strict=True)
        for a, b in zip(expected, got, strict=True)
    ]
    divergences: list[float] = []
    differences: list[float] = []
    for p, q in zip(base.logprobs, forced.logprobs, strict=True):
        divergences.append(math.fsum(math.exp(logp) * (logp - q[token]) for token, logp in p.items()))
        likeliest = max(p, key=p.__getitem__)
        differences.append(abs(p[likeliest] - q[likeliest]))
    return Parity(
        compared=name,
        greedy_share=mean(equal) / STEPS,
        whole_answers_share=mean(count == STEPS for count in equal),
        next_token_share=mean(next_tokens),
        kl_mean=mean(divergences),
        kl_max=max(divergences),
        logprob_difference_mean=mean(differences),
        logprob_difference_max=max(differences),
    )


def parity(model: str, count: int) -> tuple[list[Parity], dict[str, int]]:
    """bfloat16 against itself after fp8, and against float32; and the bytes that all the prompts' KV takes."""
    prompts = texts(model, count)
    num_blocks = prompts[-1].blocks[-1] + 1
    runner = a_runner(model, "bfloat16", num_blocks, FP8_E4M3)
    first = prefill(runner, prompts)
    base = decode(runner, prompts, first)
    for prompt in prompts:
        runner.wire.pack(prompt.own_blocks)
        runner.wire.unpack(prompt.own_blocks)
    free, forced = decode(runner, prompts, first), decode(runner, prompts, first, base.tokens)
    rows = [compare("fp8_e4m3 wire", base, free, forced)]
    sent = sum(len(prompt.own_blocks) for prompt in prompts)
    layouts = {"same": runner.layout, FP8_E4M3: runner.wire.memory.layout}
    sizes = {name: sent * layout.block_bytes for name, layout in layouts.items()}
    runner.close()

    exact = a_runner(model, "float32", num_blocks, "same")
    prefill(exact, prompts)
    free, forced = decode(exact, prompts, first), decode(exact, prompts, first, base.tokens)
    rows.append(compare("float32", base, free, forced))
    exact.close()
    return rows, sizes


def conversion(model: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds to pack and to unpack a prompt's KV on one thread, from memory that no cache holds."""
    longest = -(-max(lengths) // BLOCK_TOKENS)
    runner = a_runner(model, "bfloat16", 4 * longest, FP8_E4M3)
    prefill(runner, [Prompt(tuple(range(100, 164)), tuple(range(8)))])
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        count = -(-length // BLOCK_TOKENS)
        places = [range(begin, begin + count) for begin in range(0, 3 * longest, longest)]
        pack, unpack = (_median_ms(work, places) for work in (runner.wire.pack, runner.wire.unpack))
        rows.append({"prompt_tokens": length, "pack_ms": round(pack, 2), "unpack_ms": round(unpack, 2)})
    runner.close()
    return rows


async def exposed(model: str, lengths: Sequence[int], repeats: int, tell: Console) -> list[dict[str, Any]]:
    """`bench.handoff` with each wire type."""
    rows: list[dict[str, Any]] = []
    wire_dtypes: tuple[Literal["same", "fp8_e4m3"], ...] = ("same", "fp8_e4m3")
    for wire_dtype in wire_dtypes:
        found = await handoff.run(model, lengths, repeats, handoff.MAX_OTHER_LOAD, tell, wire_dtype)
        rows += [{"wire_dtype": wire_dtype, **row.as_json()} for row in found]
    return rows


def _execute(
    runner: ModelRunner, rows: Sequence[tuple[Prompt, Sequence[int], int]], sampling: SamplingParams
) -> list[SampledToken]:
    """One step; a row is a prompt, all its tokens so far, and how many of them are computed."""
    batch = [
        ScheduledSequence(
            request_id=str(number),
            token_ids=tokens,
            prompt_tokens=len(prompt.token_ids),
            num_computed=computed,
            num_new=len(tokens) - computed,
            block_ids=prompt.blocks,
            sample=True,
            sampling=sampling,
        )
        for number, (prompt, tokens, computed) in enumerate(rows)
    ]
    return [token for token in runner.execute(batch) if token is not None]


def _median_ms(work: Callable[[Sequence[int]], None], places: Sequence[Sequence[int]]) -> float:
    times: list[float] = []
    for number in range(TIMES + 1):
        began = time.perf_counter()
        work(places[number % len(places)])
        times.append(time.perf_counter() - began)
    return median(times[1:]) * 1e3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.handoff.narrow_kv", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument(
        "--prompts",
        type=whole_number,
        default=PROMPTS,
        help=f"for parity; 0 measures none; default: {PROMPTS}",
    )
    parser.add_argument(
        "--repeats", type=whole_number, default=EXPOSED_REPEATS, help="handoffs; 0 measures none"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    machine, tell = this_machine(), Console(stderr=True)
    rows, sizes = parity(options.model, options.prompts) if options.prompts else ([], {})
    content: dict[str, Any] = {
        "model": options.model,
        "prompts": options.prompts,
        "steps": STEPS,
        "parity": [
            {k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(row).items()} for row in rows
        ],
        "bytes": sizes,
        "conversion": conversion(options.model, EXPOSED_LENGTHS),
        "handoff": [],
    }
    if options.repeats:
        content["handoff"] = asyncio.run(exposed(options.model, EXPOSED_LENGTHS, options.repeats, tell))
    if options.json:
        command = shlex.join(["python", "-m", "bench.handoff.narrow_kv", *arguments])
        print(json.dumps(report("narrow_kv", command, machine, **content), indent=2))
    else:
        for name in ("parity", "conversion", "handoff"):
            for row in content[name]:
                print(name, *(f"{key}={value}" for key, value in row.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
