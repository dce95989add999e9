"""The logits processor that vLLM loads: samples with splitserve's own sampler and leaves vLLM no choice.

So a token depends on logits, parameters, seed and position, as everywhere else in splitserve, and goes on exactly on
another worker: penalties, grammar and seed count the output of earlier attempts. vLLM's own parameters stay greedy.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from engine.core.types import RowsFailedError, SampledToken
from engine.runner.sampler import SamplingRow, sample
from engine.runner.structured_output import MaskFiller
from engine.vllm.bridge import ROW_FIELD, VllmRow, the_bridge
from splitserve.request_guard import request_error


class SamplingProcessor(LogitsProcessor):
    """Chooses one token a row: a known one, such as the first one of a handoff, or a sampled one."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._bridge = the_bridge()
        self._rows: dict[int, VllmRow] = {}
        self._mask_filler = MaskFiller(vllm_config.model_config.get_vocab_size())

    def is_argmax_invariant(self) -> bool:
        """No: it chooses the token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the rows of vLLM's batch."""
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Raises the chosen token of each row above all others. `logits`: float32 `[rows, vocabulary]`.

        Rows of unfinished prompts stay as they are: vLLM drops their tokens. Never raises: a row that cannot be sampled
        notes why, and gets token 0.
        """
        sampled: list[tuple[int, VllmRow]] = []
        for index, row in self._rows.items():
            if not row.ends_tokens:
                continue
            if (token := row.given_token) is not None:
                logits[index, token] = float("inf")
            else:
                sampled.append((index, row))
        while sampled:
            try:
                self._sample(logits, sampled)
            except RowsFailedError as error:
                for failed in error.rows:
                    _fail(logits, *sampled[failed], error)
                sampled = [entry for place, entry in enumerate(sampled) if place not in set(error.rows)]
                continue
            except BaseException as error:
                for index, row in sampled:
                    _fail(logits, index, row, error)
            break
        return logits

    def _sample(self, logits: torch.Tensor, rows: list[tuple[int, VllmRow]]) -> None:
        batch = [row.sequence.scheduled(row.num_new) for _, row in rows]
        masks = self._mask_filler.masks(batch)
        wanted = [SamplingRow.of(sequence, masks.get(place)) for place, sequence in enumerate(batch)]
        indices = [index for index, _ in rows]
        values = logits if indices == list(range(len(logits))) else logits[indices]
        tokens: list[SampledToken] = sample(values, wanted)
        for (index, row), token in zip(rows, tokens, strict=True):
            row.sampled = token
            logits[index, token.token_id] = float("inf")

    @staticmethod
    def _row(params: Any, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> VllmRow | None:
        # vLLM's warm-up runs have no request behind them.
        key = (params.extra_args or {}).get(ROW_FIELD)
        return None if key is None else the_bridge().rows[key]


def _fail(logits: torch.Tensor, index: int, row: VllmRow, error: BaseException) -> None:
    row.failure = request_error(error, row.sequence.request_id)
    logits[index] = 0.0
