"""The state machine of a reservation: legal transitions only, no state twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_transfer.handoff import reservation as hs
from kv_transfer.handoff.reservation import HandoffState as S

Step = Callable[[S], S]

LEGAL: dict[tuple[Step, S], S] = {
    (hs.receive, S.RESERVED): S.RECEIVING,
    (hs.make_ready, S.RESERVED): S.READY,
    (hs.make_ready, S.RECEIVING): S.READY,
    (hs.run, S.READY): S.RUNNING,
    (hs.finish, S.RUNNING): S.FINISHED,
    (hs.abort, S.RESERVED): S.ABORTED,
    (hs.abort, S.RECEIVING): S.ABORTED,
    (hs.abort, S.READY): S.ABORTED,
    (hs.abort, S.RUNNING): S.ABORTED,
    (hs.quarantine, S.ABORTED): S.QUARANTINED,
    (hs.free, S.ABORTED): S.FREED,
    (hs.free, S.QUARANTINED): S.FREED,
}
STEPS: list[Step] = [hs.receive, hs.make_ready, hs.run, hs.finish, hs.abort, hs.quarantine, hs.free]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("state", list(S), ids=lambda state: state.value)
def test_every_step_from_every_state(step: Step, state: S) -> None:
    if expected := LEGAL.get((step, state)):
        assert step(state) is expected
    else:
        with pytest.raises(hs.IllegalTransitionError, match=state.value):
            step(state)


def test_no_state_comes_back() -> None:
    reachable: dict[S, set[S]] = {state: {to for (_, at), to in LEGAL.items() if at is state} for state in S}
    for _ in S:
        for to in reachable.values():
            to |= {further for state in set(to) for further in reachable[state]}
    assert all(state not in to for state, to in reachable.items())
