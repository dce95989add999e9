"""How long answers are expected to be: by session, tenant and model, in bounded room."""

from __future__ import annotations

from coordinator.caller import Caller
from coordinator.output_lengths import OutputLengths
from coordinator.pools import Model
from coordinator.request_validation import Generation
from coordinator.route_scores import TYPICAL_OUTPUT_TOKENS
from splitserve.v1 import generation_pb2


def generation(tenant: str = "a", session: str = "", max_tokens: int = 1000) -> Generation:
    return Generation(
        request_id="r",
        model=Model("m", "m", 4096, 100),
        prompt=(1,),
        sampling=generation_pb2.SamplingParams(),
        stop=generation_pb2.StopParams(max_tokens=max_tokens),
        priority=0,
        deadline_s=1.0,
        received_s=0.0,
        caller=Caller(tenant),
        session_id=session,
    )


def test_the_narrowest_known_route_counts() -> None:
    lengths = OutputLengths()
    assert lengths.expected(generation()) == TYPICAL_OUTPUT_TOKENS
    lengths.ended(generation("a"), 10)
    lengths.ended(generation("b", session="s"), 400)
    assert lengths.expected(generation("a")) == 10
    assert lengths.expected(generation("b", session="s")) == 400
    assert lengths.expected(generation("b")) == 400
    assert lengths.expected(generation("c", session="s")) == 205


def test_no_more_than_was_asked_for() -> None:
    assert OutputLengths().expected(generation(max_tokens=5)) == 5


def test_the_table_is_bounded_and_keeps_what_is_used() -> None:
    lengths = OutputLengths(max_routes=10)
    for number in range(100):
        lengths.ended(generation("a", session=f"s{number}"), number)
    assert lengths.expected(generation("a", session="s99")) == 99
    assert lengths.expected(generation("a", session="s0")) == lengths.expected(generation("a"))
