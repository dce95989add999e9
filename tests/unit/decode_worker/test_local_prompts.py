"""Prompts that a decode worker computes itself: what is told of them."""

from __future__ import annotations

import random

import pytest

from decode_worker.requests import Granted
from splitserve.v1 import decode_pb2
from tests.support.engine.connector_pair import COORDINATOR, ConnectorPair

pytestmark = pytest.mark.timeout(60)

BLOCK, BUDGET = 8, 32
PROMPT = random.Random(0).choices(range(32, 127), k=BUDGET)


def report(pair: ConnectorPair, name: str) -> decode_pb2.LocalPrefill:
    (told,) = [
        output.local_prefill
        for output in pair.decode_outputs[COORDINATOR]
        if output.request_id == name and output.HasField("local_prefill")
    ]
    return told


def test_what_is_cached_when_a_prompt_begins_is_told_not_what_was_when_it_came() -> None:
    pair = ConnectorPair(max_step_tokens=BUDGET)
    for name in ("first", "same"):
        (granted,) = pair.reserve(name, PROMPT, local_prefill_tokens=1000)
        assert isinstance(granted, Granted)
        assert granted.ticket is None
    for _ in range(40):
        pair.round()
    assert pair.tokens("first") == pair.tokens("same") != []
    assert report(pair, "first").cached_tokens == 0
    assert report(pair, "same").cached_tokens == BUDGET - BLOCK
    pair.assert_empty()
