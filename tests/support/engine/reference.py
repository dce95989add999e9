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

from engine.core.model_runner import PromptLogprobs

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

    def logprobs(self, prompt: Sequence[int]) -> Any:
        """Log-probabilities of the tokens after each but the last: float32 `[tokens - 1, vocabulary]`."""
        import torch

        with torch.inference_mode():
            return self._model(torch.tensor([list(prompt)])).logits[0, :-1].log_softmax(-1)

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # tests run side by side, and waiting threads spin
        return AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

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


def assert_prompt_logprobs(
    found: PromptLogprobs | None, prompt: Sequence[int], expected: Any, top: int, tolerance: float = 1e-3
) -> None:
    """Values, ranks and `top` alternatives of a prompt are those of `expected`, a result of `Reference.logprobs`."""
    import torch

    assert found is not None
    own = expected.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])
    likely = expected.topk(top).values
    assert list(found.token_ids) == list(prompt)
    torch.testing.assert_close(torch.tensor(found.logprobs)[:, None], own, atol=tolerance, rtol=0)
    torch.testing.assert_close(torch.tensor(found.top_logprobs).view(-1, top), likely, atol=tolerance, rtol=0)
    ids = torch.tensor(found.top_token_ids, dtype=torch.int64).view(-1, top)
    torch.testing.assert_close(expected.gather(1, ids), likely, atol=2 * tolerance, rtol=0)
    ranks = torch.tensor(found.ranks, dtype=torch.int64)
    assert ((expected > own + 2 * tolerance).sum(-1) < ranks).all()
    assert ((expected > own - 2 * tolerance).sum(-1) >= ranks - 1).all()


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
