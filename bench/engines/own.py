"""splitserve's engine on questions: `python -m bench.engines.own MODEL THREADS`."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.engines.limits import machine_limits
from bench.engines.questions import Answer, Question, serve
from engine.core import EngineCore
from engine.runner import ModelRunner, ScheduledSequence
from engine.torch_runner import build_torch_runner
from engine.types import EngineRequest, SampledToken, SamplingParams, StopParams
from splitserve.config import EngineConfig
from splitserve.hf_tokenizer import load_tokenizer
from splitserve.models import resolve_model

STEP_TOKENS = 512
MAX_SEQUENCES = 64
WARM_UP_STEPS = 2
LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 40_000
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class TimedRunner:
    """Counts the time inside the runner, so that the rest of a step is the engine's own."""

    inner: ModelRunner
    inside_s: float = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """Passes on."""
        began = time.perf_counter()
        tokens = self.inner.execute(batch)
        self.inside_s += time.perf_counter() - began
        return tokens


class OwnEngine:
    """One engine core. Every question starts with an empty cache of prefixes, for all prompts are random."""

    def __init__(self, model: str, threads: int) -> None:
        source = resolve_model(model)
        config = EngineConfig(
            dtype="bfloat16",
            threads=threads,
            kv_memory_bytes=8 * 2**30,
            max_step_tokens=STEP_TOKENS,
            max_running_requests=MAX_SEQUENCES,
            prefix_cache=False,
        )
        self._runner = TimedRunner(build_torch_runner(config, source, lambda _fraction: None))
        self._core = EngineCore(self._runner, config, load_tokenizer(source.tokenizer_source))  # type: ignore[arg-type]
        self._threads, self._numbers, self._asked = threads, random.Random(0), 0

    def answer(self, question: Question) -> Answer:
        """See `bench.engines.questions`."""
        match question["phase"]:
            case "limits":
                return machine_limits(self._threads)
            case "prefill":
                return {"step_s": [self._prefill(question["context"]) for _ in range(question["steps"])]}
            case _:
                return self._decode(question["batch"], question["context"], question["steps"])

    def _prefill(self, tokens: int) -> float:
        self._add(tokens, 1)
        began = time.perf_counter()
        while self._core.has_work():
            self._core.step()
        return time.perf_counter() - began

    def _decode(self, batch: int, context: int, steps: int) -> Answer:
        names = [self._add(context, steps + WARM_UP_STEPS + 2) for _ in range(batch)]
        tokens = 0
        while tokens < batch:  # prompts first: one token of each
            tokens += sum(len(output.token_ids) for output in self._core.step().outputs)
        step_s, outside_s = [], []
        for number in range(WARM_UP_STEPS + steps):
            self._runner.inside_s, began = 0.0, time.perf_counter()
            done = len(self._core.step().outputs)
            took = time.perf_counter() - began
            if number >= WARM_UP_STEPS and done == batch:
                step_s.append(took)
                outside_s.append(took - self._runner.inside_s)
        for name in names:
            self._core.abort(name)
        return {"step_s": step_s, "outside_s": outside_s}

    def _add(self, prompt_tokens: int, max_tokens: int) -> str:
        self._asked += 1
        prompt = tuple(self._numbers.randint(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(prompt_tokens))
        name = f"bench-{self._asked}"
        self._core.add_request(
            EngineRequest(name, prompt, GREEDY, StopParams(max_tokens=max_tokens, ignore_eos=True))
        )
        return name


if __name__ == "__main__":
    serve(OwnEngine(sys.argv[1], int(sys.argv[2])).answer)
