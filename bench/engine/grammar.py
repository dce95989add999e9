"""Cost of a grammar per step: `python -m bench.engine.grammar`.

For batches of constrained rows, at every position of a JSON answer: the masks (the grammar's process follows the last
token and tells what may come next), and the sampler with and without them, on random logits over SmolLM2's vocabulary.
All on one core; no model is loaded, so a step's own time is to be added. `compile_ms` is paid once a grammar and
worker; `vocabulary_ms` once a worker, when it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine.core.model_runner import ModelFacts, SamplingParams, ScheduledSequence
from engine.runner.sampler import sample
from engine.runner.sampling_row import SamplingRow
from engine.runner.structured_output import CompiledGrammar, GrammarCompiler, masks_of
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.v1 import generation_pb2
from splitserve.v1.generation_pb2 import Grammar

MODEL = "smollm2-135m-instruct"
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "born": {"type": "string", "format": "date"},
        "height": {"type": "integer", "minimum": 40, "maximum": 230},
        "friends": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "kind": {"enum": ["writer", "painter", "doctor"]},
    },
    "required": ["name", "born", "height", "friends", "kind"],
    "additionalProperties": False,
}
ANSWER = (
    '{"name": "Johann Sebastian Miller", "born": "1985-03-21", "height": 178, '
    '"friends": ["Anna Maria", "Christopher Smith", "Li"], "kind": "painter"}'
)
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(top_k=50, seed=1)}


def timed_ms(work: Callable[[], object]) -> float:
    """Duration of a call, milliseconds."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def step_costs(
    compiled: CompiledGrammar, answer: list[int], facts: ModelFacts, batch: int, sampling: SamplingParams
) -> dict[str, float]:
    """Medians and a 95th percentile over the positions of the answer, milliseconds per step."""
    matchers = [compiled.matcher() for _ in range(batch)]
    for matcher in matchers:
        matcher.advance(())
    logits = torch.randn(batch, facts.vocabulary_size, generator=torch.Generator().manual_seed(0)) * 3
    masks_ms, free_ms, held_ms = [], [], []
    for end in range(1, len(answer)):
        tokens = answer[:end]
        sequences = [
            ScheduledSequence(f"r{n}", tokens, 0, end - 1, 1, [0], True, sampling, frozenset(), matcher)
            for n, matcher in enumerate(matchers)
        ]
        began = time.perf_counter()
        for matcher in matchers:
            matcher.advance(tokens[-1:])
        masks = masks_of(sequences, wait_s=10)
        masks_ms.append((time.perf_counter() - began) * 1e3)
        free = [SamplingRow(sampling, tokens, 0, end) for _ in sequences]
        held = [SamplingRow(sampling, tokens, 0, end, frozenset(), masks[n]) for n in range(batch)]
        free_ms.append(timed_ms(lambda rows=free: sample(logits, rows)))  # type: ignore[misc]
        held_ms.append(timed_ms(lambda rows=held: sample(logits, rows)))  # type: ignore[misc]
    return {
        "masks_p50": median(masks_ms),
        "masks_p95": sorted(masks_ms)[int(0.95 * len(masks_ms))],
        "sampler_free": median(free_ms),
        "sampler_held": median(held_ms),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(MODEL)
    facts = ModelFacts(8192, 49152, frozenset({EOS}))
    compiler = GrammarCompiler(tokenizer, facts)

    def compiled_of(grammar: Grammar) -> CompiledGrammar:
        compiled = asyncio.run(compiler.compiled(generation_pb2.SamplingParams(grammar=grammar)))
        assert compiled is not None
        return compiled

    schema = Grammar(json_schema=json.dumps(SCHEMA))
    vocabulary_ms = timed_ms(lambda: compiled_of(Grammar(regex="a")))
    compile_ms = timed_ms(lambda: compiled_of(schema))
    compiled = compiled_of(schema)
    answer = tokenizer.encode(ANSWER)
    rows: list[dict[str, Any]] = [
        {"batch": batch, "sampling": name, **step_costs(compiled, answer, facts, batch, sampling)}
        for batch in map(int, options.batches.split(","))
        for name, sampling in SAMPLINGS.items()
    ]
    if options.json:
        print(json.dumps({"vocabulary_ms": vocabulary_ms, "compile_ms": compile_ms, "rows": rows}))
        return
    table = Table(title=f"milliseconds a step; vocabulary {vocabulary_ms:.0f} ms, schema {compile_ms:.1f} ms")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
