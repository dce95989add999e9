"""The logits processor that vLLM loads: leaves vLLM no choice of tokens. vLLM's own parameters stay greedy."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from engine.vllm.bridge import ROW_FIELD, VllmRow, the_bridge
from engine.vllm.token_chooser import TokenChooser


class SamplingProcessor(LogitsProcessor):
    """Chooses one token a row: a known one, such as the first one of a handoff, or a sampled one."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, VllmRow] = {}
        self._chooser = TokenChooser(vllm_config.model_config.get_vocab_size())

    def is_argmax_invariant(self) -> bool:
        """No: it chooses the token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the rows of vLLM's batch."""
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Raises the chosen token of each row above all others. `logits`: float32 `[rows, vocabulary]`.

        Rows of unfinished prompts stay as they are: vLLM drops their tokens.
        """
        for index, token in self._chooser.choose(logits, self._rows).items():
            logits[index, token] = float("inf")
        return logits

    @staticmethod
    def _row(params: Any, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> VllmRow | None:
        # vLLM's warm-up runs have no request behind them.
        key = row_key(params)
        return None if key is None else the_bridge().rows[key]


def row_key(params: Any) -> str | None:
    """The key of the request with these parameters of vLLM's; None for one of vLLM's own."""
    return (params.extra_args or {}).get(ROW_FIELD)
