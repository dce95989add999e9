"""`transformers` by itself on questions: `python -m bench.engine.processes.transformers_loop FOLDER THREADS`.

A batch of equal lengths, DynamicCache, greedy, logits of the last position only: the plain loop without any overhead
of `generate`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.engine.processes.questions import (
    HIGHEST_TOKEN,
    LOWEST_TOKEN,
    WARM_UP_STEPS,
    Answer,
    Question,
    serve,
)


class TransformersLoop:
    """One model in bfloat16."""

    def __init__(self, folder: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def answer(self, question: Question) -> Answer:
        """Times the prefills or decode steps that the question asks for."""
        with torch.inference_mode():
            if question["phase"] == "prefill":
                return {"step_s": [self._prefill(question["context"]) for _ in range(question["steps"])]}
            return {"step_s": self._decode(question["batch"], question["context"], question["steps"])}

    def _forward(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        logits = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        chosen: torch.Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return chosen

    def _prefill(self, tokens: int) -> float:
        prompt = torch.randint(LOWEST_TOKEN, HIGHEST_TOKEN, (1, tokens))
        began = time.perf_counter()
        self._forward(prompt, DynamicCache())
        return time.perf_counter() - began

    def _decode(self, batch: int, context: int, steps: int) -> list[float]:
        cache, step_s = DynamicCache(), []
        tokens = self._forward(torch.randint(LOWEST_TOKEN, HIGHEST_TOKEN, (batch, context)), cache)
        for number in range(WARM_UP_STEPS + steps):
            began = time.perf_counter()
            tokens = self._forward(tokens, cache)
            if number >= WARM_UP_STEPS:
                step_s.append(time.perf_counter() - began)
        return step_s


if __name__ == "__main__":
    serve(lambda: TransformersLoop(sys.argv[1], int(sys.argv[2])).answer)
