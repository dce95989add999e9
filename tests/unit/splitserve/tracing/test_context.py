"""W3C Trace Context: what is taken, what is passed on, and that nothing a client sends is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.tracing.context import MAX_TRACESTATE, TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_context_is_parsed_and_written() -> None:
    context = TraceContext.parse(GOOD, "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7")
    assert context is not None
    assert (context.trace_id, context.span_id, context.sampled) == (TRACE, SPAN, True)
    assert context.traceparent == GOOD
    assert TraceContext.from_proto(context.to_proto()) == context
    child = context.child()
    assert (child.trace_id, child.tracestate, child.sampled) == (TRACE, context.tracestate, True)
    assert child.span_id != SPAN


@pytest.mark.parametrize("flags", ["00", "02", "fe"])
def test_only_the_lowest_flag_says_sampled(flags: str) -> None:
    context = TraceContext.parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None
    assert not context.sampled


@pytest.mark.parametrize("later", [f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-comes-later"])
def test_a_later_version_is_read_as_far_as_it_is_known(later: str) -> None:
    context = TraceContext.parse(later)
    assert context is not None
    assert context.traceparent == GOOD


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "00",
        GOOD[:-1],
        GOOD + "-00",
        GOOD + "0",
        f"ff-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.later",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"00_{TRACE}_{SPAN}_01",
        f"0\u0660-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 10_000_000,
    ],
)
def test_a_wrong_traceparent_is_as_good_as_none(wrong: str) -> None:
    assert TraceContext.parse(wrong) is None


@pytest.mark.parametrize(
    "state",
    [
        "a=b",
        "a=b,c=d",
        "vendor@tenant=x",
        "a=1 2",
        " a=b , c=d ",
        "0a@b=c",
        ",".join(f"k{n}=v" for n in range(32)),
        "",
    ],
)
def test_a_tracestate_is_passed_on_as_it_is(state: str) -> None:
    context = TraceContext.parse(GOOD, state)
    assert context is not None
    assert context.tracestate == state


@pytest.mark.parametrize(
    "state",
    [
        *("a", "a=b=c", "A=b", "a=b,,c", "a= ", "a=\x00", "\u00e4=b", "a=" + "b" * MAX_TRACESTATE),
        ",".join(f"k{n}=v" for n in range(33)),
    ],
)
def test_a_wrong_tracestate_is_left_out(state: str) -> None:
    context = TraceContext.parse(GOOD, state)
    assert context is not None
    assert context.tracestate == ""


@given(st.text(max_size=200), st.text(max_size=600))
def test_no_text_is_an_error(parent: str, state: str) -> None:
    assert TraceContext.parse(parent, state) is None or len(parent) >= 55
    context = TraceContext.parse(GOOD, state)
    assert context is not None
    assert context.tracestate in ("", state)
