"""The first token of a handoff at vLLM: the prefill worker has sampled it, so the decode worker's vLLM must choose it.

vLLM computes the prompt's last position once more where the KV has come, and chooses a token there. A logits processor
leaves it one choice in that step, so that penalties, `min_tokens`, `max_tokens` and a grammar count the token as any
other. In all later steps the processor does nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

KEY_FIELD = "splitserve_key"
"""Where a request's key stands in `extra_args` of vLLM's parameters, if its first token may be given."""

given_tokens: dict[str, int] = {}
"""First tokens by key, in this rank's process: put here before vLLM schedules their requests, taken by the
processor."""


class _Row:
    """A row whose first token may be given. `output` is vLLM's own list of its output, which grows."""

    def __init__(self, key: str, output: list[int]) -> None:
        self.key, self.output = key, output


class FirstTokens(LogitsProcessor):
    """For vLLM's first model runner."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    @override
    def is_argmax_invariant(self) -> bool:
        """No: it chooses the token."""
        return False

    @override
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the rows of vLLM's batch."""
        process_dict_updates(self._rows, batch_update, self._row)

    @override
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leaves rows whose first token is given no other. `logits`: float32 `[rows, vocabulary]`."""
        for index, row in list(self._rows.items()):
            if row.output:
                given_tokens.pop(row.key, None)
                del self._rows[index]
            elif (token := given_tokens.get(row.key)) is not None:
                logits[index] = -torch.inf
                logits[index, token] = 0.0
        return logits

    @staticmethod
    def _row(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Row | None:
        key = (params.extra_args or {}).get(KEY_FIELD)
        return _Row(key, output) if key is not None and not output else None
