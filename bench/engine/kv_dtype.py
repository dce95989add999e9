"""Effect of int8 KV on outputs and speed, compared with bfloat16: `python -m bench.engine.kv_dtype [--json]`.

Closeness. Two questions to the same model, on prompts of English text (the topics of Python's own `pydoc`; for the
first `--text FILE` instead):

* the text itself, token for token through decode attention: perplexity of both, how often both find the same next token
likeliest after the same text, and the Kullback-Leibler divergence of the whole distribution, in nats;
* answers (`bench.handoff.narrow_kv` tells what its figures are): prompts are computed and continued greedily.

Speed. Two engine processes are measured in turns; the median time of a decode step and of a whole prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from bench.engine.processes.engine_process import engine_command, engine_process
from bench.engine.rows import OWN, EngineCase
from bench.engine.throughput import SETTLE_S
from bench.handoff.narrow_kv import BLOCK_TOKENS, Decoded, Parity, Prompt, compare, decode, prefill, texts
from bench.machine import report, this_machine
from engine.backends.select import make_forward
from engine.core.types import SamplingParams, ScheduledSequence
from engine.kv_cache.kv_dtype import kv_dtype
from engine.kv_cache.memory import KvCacheMemory
from engine.model.loaded_model import LoadedModel
from engine.runner.model_loader import load_model
from engine.runner.torch_runner import build_torch_runner, cpu_kernels
from kv_transfer.layout import INT8, KvLayout
from splitserve.cluster.placement import available_cores
from splitserve.config.cluster import ClusterConfig
from splitserve.config.engine import EngineConfig
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import ModelSource, resolve_model

PROMPTS = 20
TEXT_PROMPTS = 8
ROWS = 32
"""Positions of a text that are read at a time, each as a decode row."""
CASES = ("decode:8x1024", "decode:8x4096", "prefill:1x2048")
STEPS = {"decode": 12, "prefill": 2}
TURNS = 4
KV_BYTES = 2**30
"""Two engines are up at once."""
AUTO = "auto"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Closeness:
    """How near int8 KV comes to bfloat16 KV on texts, under teacher forcing."""

    tokens: int
    perplexity_bfloat16: float
    perplexity_int8: float
    next_token_share: float
    kl_mean: float
    kl_max: float


class TextReader:
    """Reads one text with KV of one dtype."""

    def __init__(self, model: LoadedModel, config: EngineConfig, tokens: Sequence[int]) -> None:
        shape = model.attention
        layout = KvLayout(
            model.fingerprint,
            kv_dtype(config, model.dtype),
            BLOCK_TOKENS,
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
        )
        count = -(-len(tokens) // BLOCK_TOKENS)
        self._tokens, self._blocks = list(tokens), list(range(count))
        kernels = cpu_kernels(config, model.dtype, model.device)
        pool = KvCacheMemory(layout, count, model.device)
        self._forward = make_forward(model, pool, config, len(tokens), kernels)
        self._context, self._backend = model.context, model.context.backend

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Log-probabilities float32 `[end - begin, vocabulary]` of what follows each of these positions."""
        self._context.backend = self._backend  # the model serves other readers too
        rows = [
            ScheduledSequence(
                "text", self._tokens, 1, at, 1, self._blocks, True, SamplingParams(), ahead=at - begin
            )
            for at in range(begin, end)
        ]
        with torch.inference_mode():
            found = self._forward.logits(rows)
            self._forward.finish()
            values = torch.empty_like(found.values)
            values[found.order] = found.values
        return values.float().log_softmax(-1)


def closeness(source: ModelSource, passages: Sequence[Sequence[int]], threads: int) -> Closeness:
    """int8 KV beside bfloat16 KV on the same weights, on cpu; token for token."""
    torch.set_num_threads(threads)
    base = EngineConfig(
        dtype="bfloat16", device="cpu", threads=threads, max_running_requests=ROWS, contiguous_kv_bytes=0
    )
    configs = [base, base.model_copy(update={"kv_cache_dtype": INT8})]
    model = load_model(source, "bfloat16", CPU, lambda _: None, kernels=cpu_kernels(base, "bfloat16", CPU))
    losses, equal, divergences = [0.0, 0.0], 0, []
    for tokens in passages:
        wide, narrow = (TextReader(model, config, tokens) for config in configs)
        for begin in range(0, len(tokens) - 1, ROWS):
            end = min(begin + ROWS, len(tokens) - 1)
            targets = torch.tensor(tokens[begin + 1 : end + 1]).unsqueeze(1)
            p, q = wide.read(begin, end), narrow.read(begin, end)
            for side, found in enumerate((p, q)):
                losses[side] -= float(found.gather(1, targets).sum())
            equal += int((p.argmax(-1) == q.argmax(-1)).sum())
            divergences += (p.exp() * (p - q)).sum(-1).tolist()
    count = len(divergences)
    return Closeness(
        tokens=count,
        perplexity_bfloat16=round(math.exp(losses[0] / count), 3),
        perplexity_int8=round(math.exp(losses[1] / count), 3),
        next_token_share=round(equal / count, 4),
        kl_mean=round(math.fsum(divergences) / count, 5),
        kl_max=round(max(divergences), 4),
    )


def answers(model: str, prompts: Sequence[Prompt]) -> Parity:
    """Greedy answers with int8 KV beside those with bfloat16 KV."""
    runs: list[tuple[list[int], Decoded, Decoded]] = []
    for name in (AUTO, INT8):
        values = {
            "num_blocks": prompts[-1].blocks[-1] + 1,
            "block_size_tokens": BLOCK_TOKENS,
            "kv_cache_dtype": name,
        }
        config = EngineConfig.model_validate(values | {"dtype": "bfloat16", "device": "cpu"})
        runner = build_torch_runner(config, resolve_model(model), lambda _share: None)
        first = prefill(runner, prompts)
        free = decode(runner, prompts, first)
        # The same first tokens as with bfloat16, and all later ones.
        forced = decode(runner, prompts, runs[0][0], runs[0][1].tokens) if runs else free
        runs.append((first, free, forced))
        runner.close()
    (_, base, _), (_, free, forced) = runs
    return compare("int8 KV", base, free, forced)


def speeds(
    model: str, threads: int, cases: Sequence[EngineCase], logs: Path, tell: Console
) -> list[dict[str, Any]]:
    """Times each case with both, alternating."""
    folder, rows = str(resolve_model(model).path), []
    with ExitStack() as stack:
        engines = {}
        for name in (AUTO, INT8):
            own = ("--kv-cache-dtype", name, "--kv-bytes", str(KV_BYTES))
            command = engine_command(OWN, folder, threads, own)
            engines[name] = stack.enter_context(engine_process(command, logs / f"{name}-{threads}.log"))
        for case in cases:
            turns: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(TURNS):
                for name in engines if turn % 2 else reversed(engines):
                    turns[name].append(median(engines[name].ask(case.question)["step_s"]) * 1e3)
                    time.sleep(SETTLE_S)
            ratios = [a / b for a, b in zip(turns[AUTO], turns[INT8], strict=True)]
            rows.append(
                {
                    "threads": threads,
                    "phase": case.phase,
                    "batch": case.batch,
                    "context_tokens": case.context,
                    "bfloat16_ms": round(median(turns[AUTO]), 2),
                    "int8_ms": round(median(turns[INT8]), 2),
                    "speedup": round(median(ratios), 2),
                    "speedups": [round(ratio, 2) for ratio in ratios],
                }
            )
            tell.print(rows[-1])
    return rows


def _case(text: str) -> EngineCase:
    phase, _, size = text.partition(":")
    batch, _, context = size.partition("x")
    if phase == "decode":
        return EngineCase("decode", int(batch), int(context), STEPS[phase])
    return EngineCase("prefill", int(batch), int(context), STEPS[phase])


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.kv_dtype", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"default: {PROMPTS}; 0 asks for none")
    parser.add_argument("--text", type=Path, help="read this file instead of the prompts")
    parser.add_argument("--case", nargs="+", type=_case, default=[_case(case) for case in CASES])
    parser.add_argument(
        "--threads", type=int, nargs="*", default=[len(available_cores()), 1], help="none: no speeds"
    )
    options = parser.parse_args()
    machine, tell = this_machine(), Console(stderr=True)
    content: dict[str, Any] = {"model": options.model, "text": None, "answers": None, "speeds": []}
    source = resolve_model(options.model)
    if options.prompts:
        prompts = texts(options.model, options.prompts)
        passages = [prompt.token_ids for prompt in prompts[:TEXT_PROMPTS]]
        if options.text is not None:
            tokenizer = load_tokenizer(source.tokenizer_source)
            passages = [tuple(tokenizer.encode(options.text.read_text(encoding="utf-8")))]
        content["text"] = asdict(closeness(source, passages, len(available_cores())))
        content["answers"] = asdict(answers(options.model, prompts))
    with tempfile.TemporaryDirectory() as logs:
        for threads in options.threads:
            content["speeds"] += speeds(options.model, threads, options.case, Path(logs), tell)
    if options.json:
        command = shlex.join(["python", "-m", "bench.engine.kv_dtype", *sys.argv[1:]])
        print(json.dumps(report("kv_dtype", command, machine, **content), indent=2))
    else:
        for name, value in content.items():
            for row in value if isinstance(value, list) else [value]:
                print(name, row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
