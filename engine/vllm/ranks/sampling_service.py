"""Chooses the tokens of all ranks' steps: rank 0 sends its logits up, every rank gets the tokens.

The engine thread sleeps in vLLM's step meanwhile, so a thread of its own serves the ranks; the two never touch a
request at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from engine.vllm.bridge import VllmBridge
from engine.vllm.ranks.rank_link import RankEndedError, RankLink
from engine.vllm.token_chooser import TokenChooser
from splitserve.v1 import ranks_pb2 as pb

NO_TOKEN = -1
MAX_ROWS = 65536


class SamplingService:
    """Serves the `links` to all ranks, in order, until they end."""

    def __init__(self, links: Sequence[RankLink], bridge: VllmBridge, vocabulary_size: int) -> None:
        self._links = links
        self._bridge = bridge
        self._vocabulary_size = vocabulary_size
        self._chooser = TokenChooser()
        self.ended = threading.Event()
        """No rank is served any more."""
        threading.Thread(target=self._run, name="rank-sampling", daemon=True).start()

    def close(self) -> None:
        """Closes the links, which ends the thread once the ranks have ended. Idempotent."""
        for link in self._links:
            link.close()

    def _run(self) -> None:
        try:
            while True:
                self._serve()
        except RankEndedError:
            return  # the engine thread sees it, too: its own links end, or vLLM's step fails
        finally:
            self.ended.set()
            self.close()  # ranks that wait for tokens end

    def _serve(self) -> None:
        request = self._links[0].receive(pb.RankLogits)
        shape = len(request.keys), request.vocabulary_size
        if not 1 <= shape[0] <= MAX_ROWS or shape[1] != self._vocabulary_size:
            raise RankEndedError(f"rank 0 sent logits of shape {shape}")
        data = bytearray(self._links[0].receive_bytes(shape[0] * shape[1] * 4))
        logits = torch.frombuffer(data, dtype=torch.float32).view(shape)
        known = ((index, self._bridge.rows.get(key)) for index, key in enumerate(request.keys))
        chosen = self._chooser.choose(logits, {index: row for index, row in known if row is not None})
        tokens = pb.RankTokens(tokens=[chosen.get(index, NO_TOKEN) for index in range(shape[0])])
        for link in self._links:
            link.send(tokens)
