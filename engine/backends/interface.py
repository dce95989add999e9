"""What all backends share: the interface `Forward`, the call of the model, and a step flattened on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.core.model_runner import ScheduledSequence

Ints = npt.NDArray[np.int64]


LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""Returns the logits `[rows, vocabulary]` of some rows, int64 `[rows]`, of a step."""


@dataclass(slots=True)
class PromptRows:
    """The rows of a step that predict tokens of prompts whose log-probabilities are wanted.

    `chunks`: each sequence, the first of its rows, and their number, which may be 0.
    """

    chunks: list[tuple[ScheduledSequence, int, int]]
    logits_of: LogitsOf | None = None
    """Set once the model has run on the step. Calls compute only the output layer."""


class StepLogits(NamedTuple):
    """The logits that a step samples from. On a GPU they may still be being computed; valid until the next step.

    `values` `[samples, vocabulary]`; `order`: the sampled sequences' indices in the batch, one per row; `argmax` waits
    for the token of each row's largest logit, -1 where that is not finite (see `sampler.sample`). None if the backend
    does not compute it. `prompts`: rows whose logits can be computed as well, until the next step.
    """

    values: torch.Tensor
    order: list[int]
    argmax: Callable[[], list[int]] | None = None
    prompts: PromptRows | None = None


class Forward(ABC):
    """Runs the model on scheduled sequences."""

    prepared: bool = False
    """Whether the last step also compiled or captured something for later steps, and so took longer."""

    @abstractmethod
    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        """Writes the new positions' KV; returns the logits of the sampled positions. May return before the
        device has done either."""

    def finish(self) -> None:
        """Waits until the step is computed. After that peers may read the KV written and overwrite the KV read."""
        return

    def poll_while_computing(self, poll: Callable[[], None]) -> None:
        """Has `poll` called repeatedly while this backend waits for a device. Backends without a device ignore it."""
        return


def compute_logits(
    module: Any,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    sample_rows: torch.Tensor,
    prompts: PromptRows | None = None,
) -> torch.Tensor:
    """Runs the model on `token_ids` and `positions`, int64 `[1, tokens]`; its attention layers call their backend.

    Returns logits `[samples, vocabulary]` of the rows `sample_rows`, int64 `[samples]`: only these go through the
    output layer. That is left to the model's own forward pass, because some families scale or cap logits there.
    `prompts` gets its `logits_of`.
    """
    logits_of: LogitsOf = partial(_logits_of, module, token_ids, positions)
    if prompts is not None:
        logits_of = prompts.logits_of = _layers_once(module.base_model, logits_of)
    return logits_of(sample_rows)


def _logits_of(
    module: Any, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    logits: torch.Tensor = module(
        input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows
    ).logits[0]
    return logits


def _layers_once(layers: Any, logits_of: LogitsOf) -> LogitsOf:
    """`logits_of` of a model whose `layers` run in the first call only; their result is kept for the later calls."""
    run, results = layers.forward, list[Any]()

    def run_once(*args: Any, **options: Any) -> Any:
        if not results:
            results.append(run(*args, **options))
        return results[0]

    def logits_of_rows(rows: torch.Tensor) -> torch.Tensor:
        layers.forward = run_once
        try:
            return logits_of(rows)
        finally:
            layers.forward = run

    return logits_of_rows


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A step on the host, sequences that compute one token first. All arrays are int64.

    `sequences` in that order; `token_ids`, `positions` `[tokens]`; `contexts` `[sequences]`: each sequence's keys after
    this step, 0 for a padded row; `query_starts` `[sequences + 1]`: index of its first token; `sample_rows`
    `[samples]`: tokens whose logits are sampled, and `sample_order` their sequences' indices in the batch as scheduled.
    `num_decode` sequences compute one token, `num_prefill` others a chunk of at most `longest_chunk` tokens. `prompts`:
    None if no log-probabilities of prompts are wanted.
    """

    sequences: Sequence[ScheduledSequence]
    token_ids: Ints
    positions: Ints
    contexts: Ints
    query_starts: Ints
    sample_rows: Ints
    sample_order: list[int]
    num_decode: int
    num_prefill: int
    longest_chunk: int
    prompts: PromptRows | None = None

    @property
    def decode_only(self) -> bool:
        """Whether every sequence computes one token."""
        return not self.num_prefill


def flatten(batch: Sequence[ScheduledSequence]) -> FlatStep:
    """Flattens a batch."""
    order = [index for index, sequence in enumerate(batch) if sequence.num_new == 1]
    num_decode = len(order)
    order += [index for index, sequence in enumerate(batch) if sequence.num_new != 1]
    sequences = [batch[index] for index in order]
    computed = np.array([sequence.num_computed for sequence in sequences], np.int64)
    counts = np.array([sequence.num_new for sequence in sequences], np.int64)
    query_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    tokens = int(query_starts[-1])
    token_ids = [sequence.token_ids[sequence.num_computed] for sequence in sequences[:num_decode]]
    for sequence in sequences[num_decode:]:
        token_ids += sequence.token_ids[sequence.num_computed : sequence.num_computed + sequence.num_new]
    return FlatStep(
        sequences=sequences,
        token_ids=np.array(token_ids, np.int64),
        positions=np.arange(tokens) + np.repeat(computed - query_starts[:-1], counts),
        contexts=computed + counts,
        query_starts=query_starts,
        sample_rows=query_starts[1:][[row for row, sequence in enumerate(sequences) if sequence.sample]] - 1,
        sample_order=[index for index in order if batch[index].sample],
        num_decode=num_decode,
        num_prefill=len(order) - num_decode,
        longest_chunk=int(counts[num_decode:].max(initial=0)),
        prompts=_prompt_rows(sequences, query_starts),
    )


def _prompt_rows(sequences: Sequence[ScheduledSequence], query_starts: Ints) -> PromptRows | None:
    wanted = [row for row, sequence in enumerate(sequences) if sequence.prompt_logprobs is not None]
    if not wanted:
        return None
    chunks = []
    for row in wanted:
        sequence = sequences[row]
        # The prompt's last token predicts the first one of the output.
        count = min(sequence.num_new, sequence.prompt_tokens - 1 - sequence.num_computed)
        chunks.append((sequence, int(query_starts[row]), count))
    return PromptRows(chunks)
