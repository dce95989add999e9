"""The first token of a handoff at vLLM's second model runner, which has another interface of logits processors."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from engine.vllm.first_token import KEY_FIELD, given_tokens


class FirstTokensV2(LogitsProcessor):
    """Leaves a row whose first token is given no other, in the step that computes its prompt's last position."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._prompt_len = req_states.prompt_len
        self._keys: dict[int, str] = {}
        """The keys of requests that have no output yet, by slot."""

    @override
    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Takes the slot's new request; returns whether its first token may be given."""
        key = (sampling_params.extra_args or {}).get(KEY_FIELD)
        self._keys.pop(req_idx, None)
        if key is None:
            return False
        self._keys[req_idx] = key
        return True

    @override
    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """`logits`: float32 `[rows, vocabulary]`, changed in place."""
        if not self._keys:
            return logits
        for slot, seen in zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=True):
            key = self._keys.get(slot)
            if key is None:
                continue
            prompt = int(self._prompt_len.np[slot])
            if seen > prompt:
                given_tokens.pop(self._keys.pop(slot), None)
            elif seen == prompt and (token := given_tokens.get(key)) is not None:
                rows = ctx.expanded_idx_mapping == slot
                logits[rows] = -torch.inf
                logits[rows, token] = 0.0
        return logits
