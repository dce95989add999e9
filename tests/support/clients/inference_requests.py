"""Requests as the coordinator has them once they are tokenized, and what caches hold of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from coordinator.request.inference_request import InferenceRequest
from coordinator.workers.prefix_index import PrefixHits
from coordinator.workers.snapshot import Model
from splitserve.v1 import generation_pb2

WORDS = Model("words", "words", 64, 100)


def inference_request(prompt: int = 3, max_tokens: int = 8, **fields: Any) -> InferenceRequest:
    """A request for `WORDS` that is received now and has a minute."""
    now = fields.get("received_s", time.monotonic())
    usual: dict[str, Any] = {
        "request_id": "r",
        "model": WORDS,
        "prompt": tuple(range(prompt)),
        "sampling": generation_pb2.SamplingParams(),
        "stop": generation_pb2.StopParams(max_tokens=max_tokens),
        "priority": 0,
        "deadline_s": now + 60,
        "received_s": now,
    }
    return InferenceRequest(**(usual | fields))


def hits_of(blocks: Mapping[int, int]) -> PrefixHits:
    """Hits from leading blocks by slot."""
    levels: dict[int, int] = {}
    for slot, depth in blocks.items():
        if depth > 0:
            levels[depth] = levels.get(depth, 0) | 1 << slot
    return PrefixHits(tuple(sorted(levels.items())))
