"""Chooses the tokens of a step of vLLM's with splitserve's own sampler.

So a token depends on logits, parameters, seed and position, as everywhere else in splitserve, and an answer continues
exactly on another worker: penalties, grammar and seed count the output of earlier attempts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.core.model_runner import RowsFailedError, SampledToken
from engine.runner.sampler import sample
from engine.runner.sampling_row import SamplingRow
from engine.runner.structured_output import MASK_WAIT_S, masks_of
from engine.vllm.bridge import VllmRow
from splitserve.rpc.status import request_error

FAILED_TOKEN = 0
"""What vLLM is given for a row that could not be sampled; the request is ended behind the step."""


class TokenChooser:
    """Stateless, but for what the rows themselves keep."""

    def choose(self, logits: torch.Tensor, rows: Mapping[int, VllmRow]) -> dict[int, int]:
        """The next token of each row that ends its tokens, by index into `logits`, float32 `[rows, vocabulary]`.

        May change `logits`. Never raises: a row that cannot be sampled notes why, and gets `FAILED_TOKEN`.
        """
        chosen: dict[int, int] = {}
        sampled: list[tuple[int, VllmRow]] = []
        for index, row in rows.items():
            if not row.ends_tokens:
                continue
            if (token := row.given_token) is not None:
                chosen[index] = token
            else:
                sampled.append((index, row))
        while sampled:
            try:
                self._sample(logits, sampled)
            except RowsFailedError as error:
                for failed in error.rows:
                    chosen[sampled[failed][0]] = _fail(sampled[failed][1], error)
                sampled = [entry for place, entry in enumerate(sampled) if place not in set(error.rows)]
                continue
            except BaseException as error:
                return chosen | {index: _fail(row, error) for index, row in sampled}
            break
        return chosen | {index: row.sampled.token_id for index, row in sampled if row.sampled is not None}

    def _sample(self, logits: torch.Tensor, rows: list[tuple[int, VllmRow]]) -> None:
        batch = [row.sequence.scheduled(row.num_new) for _, row in rows]
        masks = masks_of(batch, MASK_WAIT_S)
        wanted = [SamplingRow.of(sequence, masks.get(place)) for place, sequence in enumerate(batch)]
        indices = [index for index, _ in rows]
        values = logits if indices == list(range(len(logits))) else logits[indices]
        tokens: list[SampledToken] = sample(values, wanted)
        for (_, row), token in zip(rows, tokens, strict=True):
            row.sampled = token


def _fail(row: VllmRow, error: BaseException) -> int:
    row.failure = request_error(error, row.sequence.request_id)
    return FAILED_TOKEN
