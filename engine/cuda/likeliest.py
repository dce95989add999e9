"""Each row's largest logit, found by the GPU and brought to the host while that does other things."""

from __future__ import annotations

import torch


class Likeliest:
    """Where the largest logits of `[rows, vocabulary]` are. Making it queues the work and the copy; asking waits."""

    def __init__(self, logits: torch.Tensor) -> None:
        best, places = logits.max(dim=-1)
        found = torch.where(torch.isfinite(best), places, -1)
        self._on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.is_cuda)
        self._on_host.copy_(found, non_blocking=True)
        self._done = torch.cuda.Event() if found.is_cuda else None
        if self._done is not None:
            self._done.record()

    def __call__(self) -> list[int]:
        """The place in each row; -1 where the largest is not finite, which it is not in a row with a NaN."""
        if self._done is not None:
            self._done.synchronize()
        places: list[int] = self._on_host.tolist()
        return places
