"""Makes vLLM of a decode worker choose the first token that the prefill worker sampled.

When the KV of a prompt has arrived, vLLM computes the prompt's last position again and samples a token there. In that
step a logits processor leaves only the prefill worker's token. vLLM itself then counts the token for penalties,
`min_tokens`, `max_tokens` and the grammar. In later steps the processor does nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates
from vllm.v1.worker.gpu.sample import logits_processor as v2

ID_FIELD = "splitserve_request_id"
"""Field of `SamplingParams.extra_args`: vLLM's id of the request, for logits processors. Only requests whose KV comes
from a peer have it."""

first_tokens: dict[str, int] = {}
"""The first token of each such request, by vLLM's id, in this rank's process. The connector adds a token before vLLM
schedules the request; the logits processor removes it after use."""


class FirstTokens(LogitsProcessor):
    """The logits processor for vLLM's first model runner."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[str, list[int]]] = {}
        """By row of the batch: vLLM's id of the request, and the list to which vLLM appends the request's output."""

    @override
    def is_argmax_invariant(self) -> bool:
        return False

    @override
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def new_row(params: SamplingParams, prompt: Any, output: list[int]) -> tuple[str, list[int]] | None:
            request_id = (params.extra_args or {}).get(ID_FIELD)
            return (request_id, output) if request_id is not None and not output else None

        process_dict_updates(self._rows, batch_update, new_row)

    @override
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Changes `logits`, float32 `[rows, vocabulary]`, in place."""
        for index, (request_id, output) in list(self._rows.items()):
            if output:
                first_tokens.pop(request_id, None)
                del self._rows[index]
            elif (token := first_tokens.get(request_id)) is not None:
                logits[index] = -torch.inf
                logits[index, token] = 0.0
        return logits


class FirstTokenRank:
    """Added to the class of vLLM's ranks (`worker_extension_cls`): gives the first model runner its logits processor.

    Beside speculation vLLM calls it with one row a request, the one behind the drafts.
    """

    model_runner: Any

    def take_first_tokens(self) -> None:
        """Called in each rank once the model is loaded."""
        batch = self.model_runner.input_batch
        batch.logitsprocs.non_argmax_invariant.append(FirstTokens())
        batch.logitsprocs_need_output_token_ids = True


class FirstTokensV2(v2.LogitsProcessor):
    """The logits processor for vLLM's second model runner."""

    def __init__(self, vllm_config: Any, req_states: v2.LogitsProcRequestState) -> None:
        self._prompt_len = req_states.prompt_len
        self._ids: dict[int, str] = {}
        """vLLM's ids of requests without output, by slot of the model runner."""

    @override
    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._ids.pop(req_idx, None)
        request_id = (sampling_params.extra_args or {}).get(ID_FIELD)
        if request_id is not None:
            self._ids[req_idx] = request_id
        return request_id is not None

    @override
    def apply(self, logits: torch.Tensor, ctx: v2.LogitsContext) -> torch.Tensor:
        """Changes `logits`, float32 `[rows, vocabulary]`, in place."""
        if not self._ids:
            return logits
        lengths = ctx.seq_lens_upper_bound_np.tolist()
        for slot, length in zip(ctx.idx_mapping_np.tolist(), lengths, strict=True):
            request_id = self._ids.get(slot)
            if request_id is None:
                continue
            # 1. Shorter than the prompt: a chunk of the prompt, whose token vLLM drops.
            # 2. The whole prompt: this step samples the first token.
            # 3. Longer: the first token is out.
            prompt_len = int(self._prompt_len.np[slot])
            if length > prompt_len:
                first_tokens.pop(self._ids.pop(slot), None)
            elif length == prompt_len and (token := first_tokens.get(request_id)) is not None:
                rows = ctx.expanded_idx_mapping == slot
                logits[rows] = -torch.inf
                logits[rows, token] = 0.0
        return logits
