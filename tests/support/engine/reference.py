"""`transformers`' own greedy generation, the reference for exactness."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[2] / "data" / "greedy_answers.json"
"""What the embedded model answers: token ids by a digest of prompt and length, under the model's name."""
MODE = os.environ.get("SPLITSERVE_TEST_REFERENCES", "recorded")
"""`recorded`: answers come from the file where it has them. `sampled`: some of these are computed and must equal the
file's. `computed`: all of them. `record`: each is computed and written to the file."""
SAMPLED_SHARE, SAMPLED_ANSWERS = 0.25, 3
"""`sampled`: so many of the models that tests ask load their weights, and compute so many of the known answers."""


class Reference:
    """A model as `transformers` runs it, in float32, with its own attention."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._checks = {"recorded": 0, "sampled": _drawn()}.get(MODE, math.inf)
        """How many of the known answers are still to be computed."""

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy continuation, up to and with the end-of-sequence token."""
        digest = hashlib.sha256(json.dumps([list(prompt), max_tokens]).encode()).hexdigest()[:16]
        known = _recorded().get(self._folder.name, {}).get(digest)
        if known is not None:
            if self._checks <= 0:
                return known
            self._checks -= 1
        answer = self._computed(prompt, max_tokens)
        if MODE == "record":
            _record(self._folder.name, digest, answer)
        elif known is not None:
            assert answer == known, f"transformers answers otherwise than {RECORDED.name} says: {digest}"
        return answer

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # tests run side by side, and waiting threads spin
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()

    def _computed(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        import torch

        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                repetition_penalty=1.0,
                pad_token_id=0,
            )
        return [int(token) for token in output[0, len(prompt) :]]


def _drawn() -> int:
    return SAMPLED_ANSWERS if random.random() < SAMPLED_SHARE else 0


def _recorded() -> dict[str, dict[str, list[int]]]:
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def _record(model: str, digest: str, answer: list[int]) -> None:
    models = _recorded()
    models.setdefault(model, {})[digest] = answer
    ordered = {name: dict(sorted(answers.items())) for name, answers in sorted(models.items())}
    lines = json.dumps(ordered, separators=(",", ":")).replace("],", "],\n")
    RECORDED.write_text(lines + "\n")
