"""What vLLM's callbacks leave for the engine; needs no vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.core.engine import EngineRequest, StopParams
from engine.core.model_runner import SamplingParams
from engine.core.sequence import Sequence
from engine.vllm.bridge import VllmBridge, VllmRow, close_bridge, open_bridge, the_bridge
from splitserve.errors import BrokenInvariantError


@pytest.fixture
def bridge() -> Iterator[VllmBridge]:
    yield open_bridge()
    close_bridge()


def row_of(bridge: VllmBridge, tokens: int) -> VllmRow:
    request = EngineRequest("r", tuple(range(tokens)), SamplingParams(), StopParams(9))
    row = bridge.rows["0"] = VllmRow("0", Sequence(request, 0), vllm_tokens=tokens)
    return row


def test_one_bridge_a_process(bridge: VllmBridge) -> None:
    assert the_bridge() is bridge
    with pytest.raises(BrokenInvariantError):
        open_bridge()
    close_bridge()
    with pytest.raises(BrokenInvariantError):
        the_bridge()


def test_only_the_end_of_a_prompt_is_sampled(bridge: VllmBridge) -> None:
    row = row_of(bridge, 10)
    bridge.schedule("0", 0, 6)
    assert not row.ends_tokens
    bridge.schedule("0", 6, 4)
    assert row.ends_tokens
    assert row.given_token is None


def test_the_first_token_of_a_handoff_is_given(bridge: VllmBridge) -> None:
    row = row_of(bridge, 10)
    row.sequence.append(77, 100)
    bridge.schedule("0", 9, 1)
    assert row.ends_tokens
    assert row.given_token == 77
    row.vllm_tokens += 1
    bridge.schedule("0", 10, 1)
    assert row.ends_tokens
    assert row.given_token is None


def test_reports_are_taken_once(bridge: VllmBridge) -> None:
    bridge.reports_sent.add("a")
    bridge.reports_received.add("b")
    assert bridge.take_reports() == ({"a"}, {"b"})
    assert bridge.take_reports() == (set(), set())
