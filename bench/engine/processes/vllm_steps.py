"""vLLM's engine on questions, in its own environment: `python bench/engine/processes/vllm_steps.py FOLDER`.

The engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) and is stepped by hand, so that each step is timed
like ours: scheduling, model, sampling, detokenization. Threads come from VLLM_CPU_OMP_THREADS_BIND. Prefix caching is
off; a prompt is one step, which is the faster way for it here.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from questions import HIGHEST_TOKEN, LOWEST_TOKEN, Answer, Question, decode_steps, decode_tokens, serve  # type: ignore[import-not-found]

CONTEXT_TOKENS = 8192
MAX_SEQUENCES = 64


class VllmSteps:
    """One vLLM engine."""

    def __init__(self, folder: str) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self._params = SamplingParams
        arguments = EngineArgs(
            model=folder,
            dtype="bfloat16",
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=MAX_SEQUENCES,
            max_num_batched_tokens=CONTEXT_TOKENS,
            enable_prefix_caching=False,
        )
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        self._numbers, self._asked = random.Random(0), 0

    def answer(self, question: Question) -> Answer:
        """Times the prefills or decode steps that the question asks for."""
        if question["phase"] == "prefill":
            return {"step_s": [self._prefill(question["context"]) for _ in range(question["steps"])]}
        return {"step_s": self._decode(question["batch"], question["context"], question["steps"])}

    def _prefill(self, tokens: int) -> float:
        self._add(tokens, 1)
        began = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - began

    def _decode(self, batch: int, context: int, steps: int) -> list[float]:
        max_tokens = decode_tokens(batch, context, steps, CONTEXT_TOKENS - MAX_SEQUENCES)
        names = [self._add(context, max_tokens) for _ in range(batch)]
        step_s = list(decode_steps(self._step, names, steps))
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return step_s

    def _step(self) -> list[str]:
        return [output.request_id for output in self._engine.step() if output.outputs[0].token_ids]

    def _add(self, prompt_tokens: int, max_tokens: int) -> str:
        self._asked += 1
        name = f"bench-{self._asked}"
        prompt = [self._numbers.randint(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(prompt_tokens)]
        options = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, options)
        return name


if __name__ == "__main__":
    serve(lambda: VllmSteps(sys.argv[1]).answer)
