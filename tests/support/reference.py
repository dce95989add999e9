"""`transformers`' own greedy generation, the reference for exactness."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """A model as `transformers` runs it, in float32, with its own attention."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)  # tests run side by side, and waiting threads spin
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy continuation, up to and with the end-of-sequence token."""
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
