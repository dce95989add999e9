"""The state machine of a reservation: legal transitions only, no state twice."""

from __future__ import annotations

import pytest

from kv_transfer.handoff.reservation_table import HandoffState as S
from kv_transfer.handoff.reservation_table import IllegalTransitionError, Reservation

LEGAL: frozenset[tuple[S, S]] = frozenset(
    {
        (S.RESERVED, S.RECEIVING),
        (S.RESERVED, S.READY),
        (S.RECEIVING, S.READY),
        (S.READY, S.RUNNING),
        (S.RUNNING, S.FINISHED),
        (S.RESERVED, S.ABORTED),
        (S.RECEIVING, S.ABORTED),
        (S.READY, S.ABORTED),
        (S.RUNNING, S.ABORTED),
        (S.ABORTED, S.QUARANTINED),
        (S.ABORTED, S.FREED),
        (S.QUARANTINED, S.FREED),
    }
)
"""From a state to another."""


@pytest.mark.parametrize("to", list(S), ids=lambda state: state.value)
@pytest.mark.parametrize("state", list(S), ids=lambda state: state.value)
def test_every_step_from_every_state(state: S, to: S) -> None:
    reservation = Reservation(1, "r", "c", 1, 1, 1.0, 1.0, state)
    if (state, to) in LEGAL:
        reservation.become(to)
        assert reservation.state is to
    else:
        with pytest.raises(IllegalTransitionError, match=state.value):
            reservation.become(to)
        assert reservation.state is state


def test_no_state_comes_back() -> None:
    reachable: dict[S, set[S]] = {state: {to for at, to in LEGAL if at is state} for state in S}
    for _ in S:
        for to in reachable.values():
            to |= {further for state in set(to) for further in reachable[state]}
    assert all(state not in to for state, to in reachable.items())
