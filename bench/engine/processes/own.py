"""splitserve's engine on questions: `python -m bench.engine.processes.own MODEL THREADS [--device D]
[--random-weights]`."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bench.engine.limits import cuda_limits, machine_limits
from bench.engine.processes.questions import (
    HIGHEST_TOKEN,
    LOWEST_TOKEN,
    Answer,
    Question,
    decode_steps,
    decode_tokens,
    serve,
)
from bench.engine.processes.random_model import loaded_runner
from engine.core.engine import EngineRequest, StopParams
from engine.core.engine_core import EngineCore
from engine.core.model_runner import (
    ModelRunner,
    PendingStep,
    SampledToken,
    SamplingParams,
    ScheduledSequence,
    warm_up,
)
from engine.runner.device import choose_device
from splitserve.config.engine import EngineConfig

STEP_TOKENS = 512
KV_BYTES = 8 * 2**30
MAX_SEQUENCES = 64
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class TimedRunner:
    """Measures time inside the runner; the rest of a step is the engine's own."""

    inner: ModelRunner
    inside_s: float = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        """Delegates."""
        began = time.perf_counter()
        finish = self.inner.begin(batch)
        self.inside_s += time.perf_counter() - began
        return partial(self._finish, finish)

    def _finish(self, finish: PendingStep) -> list[SampledToken | None]:
        began = time.perf_counter()
        tokens = finish()
        self.inside_s += time.perf_counter() - began
        return tokens


class OwnEngine:
    """One engine core. Prompts are random: nothing is found in the prefix cache."""

    def __init__(
        self,
        model: str,
        threads: int,
        device: str,
        random_weights: bool,
        kv_bytes: int = KV_BYTES,
    ) -> None:
        on_cpu = device == "cpu"
        # The GPU's limits first, while its memory is free.
        self._limits = None if on_cpu else cuda_limits(choose_device(device))
        config = EngineConfig(
            dtype="bfloat16",
            device=device,
            threads=threads,
            kv_memory_bytes=kv_bytes if on_cpu else None,
            max_step_tokens=STEP_TOKENS if on_cpu else None,
            max_running_requests=MAX_SEQUENCES,
            prefix_cache=False,
        )
        runner, tokenizer = loaded_runner(model, config, random_weights=random_weights)
        self._runner = TimedRunner(runner)
        warm_up(runner, None)
        self._core = EngineCore(self._runner, config, tokenizer)  # type: ignore[arg-type]
        self._threads, self._numbers, self._asked = threads, random.Random(0), 0

    def answer(self, question: Question) -> Answer:
        """Times the steps that the question asks for; `limits` is answered with what the machine gives."""
        match question["phase"]:
            case "limits":
                return self._limits or machine_limits(self._threads)
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
        chunk_tokens = STEP_TOKENS - MAX_SEQUENCES
        max_tokens = decode_tokens(batch, context, steps, chunk_tokens)
        names = [self._add(context, max_tokens) for _ in range(batch)]
        step_s, outside_s = [], []
        for took in decode_steps(self._step, names, steps):
            step_s.append(took)
            outside_s.append(took - self._runner.inside_s)
        for name in names:
            self._core.abort(name)
        return {"step_s": step_s, "outside_s": outside_s}

    def _step(self) -> list[str]:
        self._runner.inside_s = 0.0
        return [output.request_id for output in self._core.step().outputs if output.token_ids]

    def _add(self, prompt_tokens: int, max_tokens: int) -> str:
        self._asked += 1
        prompt = tuple(self._numbers.randint(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(prompt_tokens))
        name = f"bench-{self._asked}"
        self._core.add_request(
            EngineRequest(name, prompt, GREEDY, StopParams(max_tokens=max_tokens, ignore_eos=True))
        )
        return name


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--kv-bytes", type=int, default=KV_BYTES, help="of the pool on cpu")
    asked = parser.parse_args()
    serve(
        lambda: (
            OwnEngine(
                asked.model,
                asked.threads,
                asked.device,
                asked.random_weights,
                asked.kv_bytes,
            ).answer
        )
    )
