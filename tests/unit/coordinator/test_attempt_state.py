"""Every transition of an attempt, and that nothing else may happen."""

from __future__ import annotations

import itertools

import pytest

from coordinator.attempt import IN_FLIGHT, TRANSITIONS, AttemptEvent, AttemptState, after, fruitless_attempts
from coordinator.health.circuit_breakers import MOVED, WRONG_ROLE
from splitserve.errors import SplitserveError

S, E = AttemptState, AttemptEvent

RESERVED = (E.ASK_DECODE, E.TICKET)
PATHS = {
    "split, in the usual order": (
        (*RESERVED, E.ASK_PREFILL, E.FIRST_TOKEN, E.PREFILL_OVER, E.DECODE_HAS_KV, E.LAST_OUTPUT),
        [S.RESERVING, S.RESERVED, S.PREFILLING, S.TRANSFERRING, S.WRITTEN, S.REPORTED, S.FINISHED],
    ),
    "decode output comes before the report": (
        (*RESERVED, E.ASK_PREFILL, E.FIRST_TOKEN, E.DECODE_HAS_KV, E.PREFILL_OVER, E.LAST_OUTPUT),
        [S.RESERVING, S.RESERVED, S.PREFILLING, S.TRANSFERRING, S.DECODING, S.REPORTED, S.FINISHED],
    ),
    "decode output comes before the first token, the report comes after the end": (
        (*RESERVED, E.ASK_PREFILL, E.DECODE_HAS_KV, E.FIRST_TOKEN, E.LAST_OUTPUT, E.PREFILL_OVER),
        [S.RESERVING, S.RESERVED, S.PREFILLING, S.OVERTAKEN, S.DECODING, S.SETTLING, S.FINISHED],
    ),
    "the prompt is computed on decode": (
        (E.ASK_DECODE, E.COMPUTES_LOCALLY, E.LAST_OUTPUT),
        [S.RESERVING, S.LOCAL, S.FINISHED],
    ),
    "one token, no decode worker": (
        (E.ASK_PREFILL, E.FIRST_TOKEN, E.LAST_TOKEN),
        [S.PREFILLING, S.TRANSFERRING, S.ENDED_AT_PREFILL],
    ),
    "the first token ends it, KV was written": (
        (*RESERVED, E.ASK_PREFILL, E.FIRST_TOKEN, E.PREFILL_OVER, E.LAST_TOKEN),
        [S.RESERVING, S.RESERVED, S.PREFILLING, S.TRANSFERRING, S.WRITTEN, S.ENDED_AT_PREFILL],
    ),
    "the first token ends it, decode has the KV": (
        (*RESERVED, E.ASK_PREFILL, E.FIRST_TOKEN, E.DECODE_HAS_KV, E.LAST_TOKEN),
        [S.RESERVING, S.RESERVED, S.PREFILLING, S.TRANSFERRING, S.DECODING, S.ENDED_AT_PREFILL],
    ),
    "the first token ends it, both are known": (
        (*RESERVED, E.ASK_PREFILL, E.FIRST_TOKEN, E.PREFILL_OVER, E.DECODE_HAS_KV, E.LAST_TOKEN),
        [S.RESERVING, S.RESERVED, S.PREFILLING, S.TRANSFERRING, S.WRITTEN, S.REPORTED, S.ENDED_AT_PREFILL],
    ),
    "no blocks": ((E.ASK_DECODE, E.REFUSAL), [S.RESERVING, S.REFUSED]),
}  # fmt: skip


def taken(events: tuple[AttemptEvent, ...]) -> list[tuple[AttemptState, AttemptEvent]]:
    """The transitions of a path."""
    state, found = S.NEW, []
    for event in events:
        found.append((state, event))
        state = after(state, event)
    return found


@pytest.mark.parametrize(("events", "states"), PATHS.values(), ids=PATHS)
def test_paths_of_an_attempt(events: tuple[AttemptEvent, ...], states: list[AttemptState]) -> None:
    assert [after(*transition) for transition in taken(events)] == states


def test_a_worker_may_fail_whenever_output_is_to_come_and_at_no_other_time() -> None:
    assert {state for state in S if (state, E.FAILURE) in TRANSITIONS} == IN_FLIGHT
    assert {TRANSITIONS[state, E.FAILURE] for state in IN_FLIGHT} == {S.FAILED}
    assert IN_FLIGHT.isdisjoint({S.NEW, S.RESERVING, S.RESERVED, S.SETTLING, S.FINISHED, S.FAILED})


def test_the_paths_cover_all_transitions() -> None:
    failures = {(state, E.FAILURE) for state in IN_FLIGHT}
    ways = {transition for events, _ in PATHS.values() for transition in taken(events)}
    assert set(TRANSITIONS) == ways | failures


def test_all_other_transitions_are_refused() -> None:
    illegal = [pair for pair in itertools.product(S, E) if pair not in TRANSITIONS]
    assert len(illegal) == len(S) * len(E) - len(TRANSITIONS)
    for state, event in illegal:
        with pytest.raises(SplitserveError, match=state.value) as caught:
            after(state, event)
        assert caught.value.reason == "ILLEGAL_TRANSITION"


def test_what_has_ended_stays_so() -> None:
    for state in (S.REFUSED, S.ENDED_AT_PREFILL, S.FINISHED, S.FAILED):
        assert not [event for event in E if (state, event) in TRANSITIONS]


def test_moves_do_not_count_as_fruitless() -> None:
    assert fruitless_attempts(2, 0, MOVED) == 2
    assert fruitless_attempts(2, 0, WRONG_ROLE) == 2
    assert fruitless_attempts(2, 0, "WORKER_LOST") == 3
    assert fruitless_attempts(2, 1, MOVED) == 0
