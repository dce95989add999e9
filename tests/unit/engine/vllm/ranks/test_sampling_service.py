"""Rank 0 sends logits, and every rank gets the tokens that the worker's sampler chose."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest
import torch

from engine.core.engine import EngineRequest, StopParams
from engine.core.model_runner import SamplingParams
from engine.core.sequence import Sequence
from engine.vllm.bridge import VllmBridge, VllmRow
from engine.vllm.ranks.rank_link import RankEndedError, RankLink
from engine.vllm.ranks.sampling_service import NO_TOKEN, SamplingService
from splitserve.v1 import ranks_pb2 as pb

VOCABULARY, PROMPT = 40, (1, 2, 3)

pytestmark = pytest.mark.timeout(30)


def scheduled(bridge: VllmBridge, key: str, num_new: int, *, known: tuple[int, ...] = ()) -> VllmRow:
    request = EngineRequest(key, PROMPT, SamplingParams(temperature=0.0), StopParams(5))
    row = VllmRow(key, Sequence(request, 0), vllm_tokens=len(PROMPT))
    row.sequence.tokens.extend(known)
    bridge.rows[key] = row
    bridge.schedule(key, 0, num_new)
    return row


def served(bridge: VllmBridge, ranks: int) -> tuple[SamplingService, list[RankLink]]:
    pipes = [Pipe() for _ in range(ranks)]
    service = SamplingService([RankLink(ours, "a rank") for ours, _ in pipes], bridge, VOCABULARY)
    return service, [RankLink(theirs, "the worker") for _, theirs in pipes]


def test_every_rank_gets_the_chosen_tokens() -> None:
    bridge = VllmBridge()
    sampled = scheduled(bridge, "sampled", 3)
    scheduled(bridge, "given", 3, known=(17,))
    scheduled(bridge, "unfinished", 2)
    _, ranks = served(bridge, 2)
    logits = torch.zeros(5, VOCABULARY)
    logits[0, 23] = logits[1, 5] = 1.0
    for _ in range(2):
        keys = ["sampled", "given", "unfinished", "unknown", ""]
        ranks[0].send(pb.RankLogits(keys=keys, vocabulary_size=VOCABULARY))
        ranks[0].send_bytes(memoryview(logits.numpy()).cast("B"))
        for rank in ranks:
            assert list(rank.receive(pb.RankTokens).tokens) == [23, 17, NO_TOKEN, NO_TOKEN, NO_TOKEN]
    assert sampled.sampled is not None
    assert sampled.sampled.token_id == 23


@pytest.mark.parametrize(("rows", "vocabulary_size"), [(0, VOCABULARY), (1, VOCABULARY + 1)])
def test_logits_of_another_shape_end_the_service(rows: int, vocabulary_size: int) -> None:
    service, ranks = served(VllmBridge(), 1)
    ranks[0].send(pb.RankLogits(keys=[""] * rows, vocabulary_size=vocabulary_size))
    service.ended.wait()
    with pytest.raises(RankEndedError):
        ranks[0].receive(pb.RankTokens)
