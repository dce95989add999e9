"""Effect of int8 KV on outputs and speed, compared with bfloat16: `python -m bench.kv_dtype [--json]`.

Closeness. Two questions to the same model, on prompts of English text (the topics of Python's own `pydoc`; for the
first `--text FILE` instead):

* the text itself, token for token through decode attention: perplexity of both, how often both find the same next token
likeliest after the same text, and the Kullback-Leibler divergence of the whole distribution, in nats;
* answers (`bench.handoff.narrow_kv` tells what its figures are): prompts are computed and continued greedily.

Speed. Two engines in one process are measured in turns: a whole decode step, of sequences whose blocks lie in random
order, and a whole prompt, both with sampling. `speedup` is the median of the turns' own ratios.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from bench.handoff.narrow_kv import BLOCK_TOKENS, Decoded, Parity, Prompt, compare, decode, prefill, texts
from bench.machine import show_content, this_machine
from bench.option_values import add_narrower_options, positive_whole
from engine.backends.select import make_forward
from engine.core.types import SamplingParams, ScheduledSequence
from engine.kv_cache.kv_dtype import kv_dtype
from engine.kv_cache.memory import KvCacheMemory
from engine.model.loaded_model import LoadedModel
from engine.runner.model_loader import load_model
from engine.runner.torch_runner import build_torch_runner
from engine.runner.weights import cpu_kernels
from kv_transfer.layout import INT8, KvLayout
from splitserve.cluster.placement import available_cores
from splitserve.config.engine import EngineConfig
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import ModelSource, resolve_model

PROMPTS = 20
TEXT_PROMPTS = 8
ROWS = 32
"""Positions of a text that are read at a time, each as a decode row."""
CASES = ("decode:8x1024", "decode:8x4096", "prefill:1x2048")
STEPS = 5
TURNS = 8
CHUNK = 512
GREEDY = SamplingParams(temperature=0.0)
AUTO = "auto"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class KvCase:
    """One thing to time. `context_tokens`: the prompt's length, or the tokens of each sequence that decodes."""

    phase: str
    batch: int
    context_tokens: int


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


class TimedEngine:
    """A runner whose blocks hold the KV of a prompt, again and again."""

    def __init__(self, model: str, kv: str, threads: int, tokens: int) -> None:
        blocks = -(-tokens // BLOCK_TOKENS)
        values = {"num_blocks": blocks, "block_size_tokens": BLOCK_TOKENS, "kv_cache_dtype": kv}
        values |= {"dtype": "bfloat16", "device": "cpu", "threads": threads}
        self.runner = build_torch_runner(
            EngineConfig.model_validate(values), resolve_model(model), lambda _: None
        )
        self._order = random.Random(0).sample(range(blocks), blocks)  # as after hours of service
        self.prefill(CHUNK)
        held = self.runner.read_blocks(self._order)
        prompt = CHUNK // BLOCK_TOKENS
        for number, block in enumerate(held[prompt:]):
            block[:] = held[number % prompt]

    def prefill(self, tokens: int) -> float:
        """Seconds that a prompt of these many tokens takes, in chunks."""
        ids = [100 + place % 1000 for place in range(tokens)]
        began = time.perf_counter()
        for begin in range(0, tokens, CHUNK):
            new = min(CHUNK, tokens - begin)
            self.runner.execute([self._row("0", ids, begin, new, self._order, begin + new == tokens)])
        return time.perf_counter() - began

    def decode(self, batch: int, context: int) -> float:
        """Seconds of a step with the last of `context` tokens in each of `batch` sequences: median of several."""
        columns = -(-context // BLOCK_TOKENS)
        ids = [100] * context
        tables = [self._order[row * columns : (row + 1) * columns] for row in range(batch)]
        rows = [self._row(str(row), ids, context - 1, 1, table, True) for row, table in enumerate(tables)]
        taken = []
        for _ in range(STEPS):
            began = time.perf_counter()
            self.runner.execute(rows)
            taken.append(time.perf_counter() - began)
        return median(taken)

    @staticmethod
    def _row(
        name: str, ids: list[int], computed: int, new: int, blocks: list[int], sample: bool
    ) -> ScheduledSequence:
        return ScheduledSequence(name, ids, len(ids), computed, new, blocks, sample, GREEDY)


def speeds(
    model: str, threads: int, cases: Sequence[KvCase], turns: int, tell: Console
) -> list[dict[str, Any]]:
    """Times each case with both, alternating, after one turn of each."""
    tokens = max(case.batch * (case.context_tokens + BLOCK_TOKENS) for case in cases)
    engines = {name: TimedEngine(model, name, threads, tokens) for name in (AUTO, INT8)}
    rows = []
    for case in cases:
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(turns + 1):
            for name in engines if turn % 2 else reversed(engines):
                engine = engines[name]
                if case.phase == "decode":
                    taken[name].append(engine.decode(case.batch, case.context_tokens) * 1e3)
                else:
                    taken[name].append(engine.prefill(case.context_tokens) * 1e3)
        wide, narrow = taken[AUTO][1:], taken[INT8][1:]
        ratios = sorted(a / b for a, b in zip(wide, narrow, strict=True))
        rows.append(
            {
                "threads": threads,
                **asdict(case),
                "bfloat16_ms": round(median(wide), 2),
                "int8_ms": round(median(narrow), 2),
                "speedup": round(median(ratios), 2),
                "speedup_least": round(ratios[0], 2),
                "speedup_most": round(ratios[-1], 2),
            }
        )
        tell.print(rows[-1])
    for engine in engines.values():
        engine.runner.close()
    return rows


def _case(text: str) -> KvCase:
    phase, _, size = text.partition(":")
    batch, _, context = size.partition("x")
    return KvCase(phase, int(batch), int(context))


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv_dtype", description=__doc__.partition("\n")[0])
    add_narrower_options(parser, PROMPTS)
    parser.add_argument("--text", type=Path, help="read this file instead of the prompts")
    parser.add_argument("--case", nargs="+", type=_case, default=[_case(case) for case in CASES])
    parser.add_argument("--turns", type=positive_whole, default=TURNS)
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
    for threads in options.threads:
        content["speeds"] += speeds(options.model, threads, options.case, options.turns, tell)
    show_content("kv_dtype", "bench.kv_dtype", machine, content, as_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
