"""Effect of int8 weights on outputs and speed, compared with bfloat16: `python -m bench.engine.quantization [--json]`.

Closeness. Two questions to the same model, on prompts of English text (the topics of Python's own `pydoc`):

* the text itself: perplexity of both, and how often both find the same next token likeliest after the same text;
* answers (`bench.handoff.narrow_kv` tells what its figures are): prompts are computed and continued greedily, by
int8 alone,
  and by pairs of which only the prefill side or only the decode side is int8. Such pairs are refused in service.

Speed. Two engine processes are measured in turns; the median time of a decode step and of a whole prompt.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from bench.engine.processes.engine_process import engine_command, engine_process
from bench.engine.rows import OWN, EngineCase
from bench.engine.throughput import SETTLE_S, TURNS
from bench.handoff.narrow_kv import BLOCK_TOKENS, Parity, Prompt, compare, decode, prefill, texts
from bench.machine import show_content, this_machine
from bench.option_values import add_narrower_options
from engine.backends.cpu.int8_linears import quantize_linears
from engine.core.model_runner import ModelRunner
from engine.runner.torch_runner import build_torch_runner
from splitserve.config.engine import EngineConfig
from splitserve.models.sources import resolve_model

PROMPTS = 20
TEXT_PROMPTS = 8
CASES = [
    *(EngineCase("decode", batch, 128, 12) for batch in (1, 8, 32)),
    *(EngineCase("prefill", 1, tokens, 2) for tokens in (512, 2048)),
]
KV_BYTES = 2**30
"""Two engines are up at once."""
NONE, INT8 = "none", "int8"
SIDES = ((INT8, INT8), (INT8, NONE), (NONE, INT8))


def on_text(model: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Both versions of the model on the same texts."""
    source = resolve_model(model)
    module: Any = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.bfloat16).eval()

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        return found

    wide = [logits(prompt.token_ids) for prompt in prompts]
    quantize_linears(module, module.get_output_embeddings(), lambda: logits(prompts[0].token_ids[:8]))
    lost, kept_loss, equal, divergence, count = 0.0, 0.0, 0, 0.0, 0
    for prompt, base in zip(prompts, wide, strict=True):
        narrow, targets = logits(prompt.token_ids)[:-1], torch.tensor(prompt.token_ids[1:])
        p, q = base[:-1].log_softmax(-1), narrow.log_softmax(-1)
        kept_loss -= float(p.gather(1, targets[:, None]).sum())
        lost -= float(q.gather(1, targets[:, None]).sum())
        equal += int((p.argmax(-1) == q.argmax(-1)).sum())
        divergence += float((p.exp() * (p - q)).sum())
        count += len(targets)
    return {
        "tokens": count,
        "perplexity_bfloat16": round(math.exp(kept_loss / count), 3),
        "perplexity_int8": round(math.exp(lost / count), 3),
        "next_token_share": round(equal / count, 4),
        "kl_mean": round(divergence / count, 5),
    }


def a_runner(model: str, quantization: str, num_blocks: int) -> ModelRunner:
    """An engine's runner on all cores."""
    values = {"quantization": quantization, "num_blocks": num_blocks, "block_size_tokens": BLOCK_TOKENS}
    config = EngineConfig.model_validate(values | {"dtype": "bfloat16", "device": "cpu"})
    return build_torch_runner(config, resolve_model(model), lambda _share: None)


def answers(model: str, prompts: Sequence[Prompt]) -> list[Parity]:
    """Parity of each pair of prefill and decode weights with bfloat16 on both sides."""
    blocks = prompts[-1].blocks[-1] + 1
    runners = {name: a_runner(model, name, blocks) for name in (NONE, INT8)}
    first = {name: prefill(runner, prompts) for name, runner in runners.items()}
    kv = {name: _copy(runner, range(blocks)) for name, runner in runners.items()}
    base = decode(runners[NONE], prompts, first[NONE])
    rows: list[Parity] = []
    for prefilled, decoded in SIDES:
        runner = runners[decoded]
        _put(runner, kv[prefilled])
        free = decode(runner, prompts, first[prefilled])
        _put(runner, kv[prefilled])
        forced = decode(runner, prompts, first[NONE], base.tokens)
        rows.append(compare(f"prefill {prefilled}, decode {decoded}", base, free, forced))
    for runner in runners.values():
        runner.close()
    return rows


def _copy(runner: ModelRunner, blocks: range) -> list[bytes]:
    return [bytes(block) for block in runner.read_blocks(blocks)]


def _put(runner: ModelRunner, kv: Sequence[bytes]) -> None:
    for block, content in zip(runner.read_blocks(range(len(kv))), kv, strict=True):
        block[:] = content


def speeds(model: str, threads: int, logs: Path, tell: Console) -> list[dict[str, Any]]:
    """Times each case with both, alternating."""
    folder, rows = str(resolve_model(model).path), []
    with ExitStack() as stack:
        engines = {}
        for name in (NONE, INT8):
            own = ("--quantization", name, "--kv-bytes", str(KV_BYTES))
            command = engine_command(OWN, folder, threads, own)
            engines[name] = stack.enter_context(engine_process(command, logs / f"{name}-{threads}.log"))
        for case in CASES:
            steps: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(TURNS):
                for name in engines if turn % 2 else reversed(engines):
                    steps[name] += engines[name].ask(case.question)["step_s"]
                    time.sleep(SETTLE_S)
            wide, narrow = (median(steps[name]) * 1e3 for name in (NONE, INT8))
            rows.append(
                {
                    "threads": threads,
                    "phase": case.phase,
                    "batch": case.batch,
                    "context_tokens": case.context,
                    "bfloat16_ms": round(wide, 2),
                    "int8_ms": round(narrow, 2),
                    "speedup": round(wide / narrow, 3),
                }
            )
            tell.print(rows[-1])
    return rows


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.quantization", description=__doc__.partition("\n")[0]
    )
    add_narrower_options(parser, PROMPTS)
    options = parser.parse_args()
    machine, tell = this_machine(), Console(stderr=True)
    content: dict[str, Any] = {"model": options.model, "text": None, "answers": [], "speeds": []}
    if options.prompts:
        prompts = texts(options.model, options.prompts)
        content["text"] = on_text(options.model, prompts[:TEXT_PROMPTS])
        found = answers(options.model, prompts)
        content["answers"] = [
            {
                key: round(value, 5) if isinstance(value, float) else value
                for key, value in asdict(row).items()
            }
            for row in found
        ]
    with tempfile.TemporaryDirectory() as logs:
        for threads in options.threads:
            content["speeds"] += speeds(options.model, threads, Path(logs), tell)
    show_content("quantization", "bench.engine.quantization", machine, content, as_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
