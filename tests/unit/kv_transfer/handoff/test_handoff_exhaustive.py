"""The handoff explored completely, with the production state machines; see tests/support/handoff/world.py.

docs/internals/handoff.md has the counts that this test prints, and what the exploration assumes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.attempt import DecodeRelease
from kv_transfer.handoff import reservation_table
from kv_transfer.handoff.messages import KvTicket
from kv_transfer.handoff.pusher import KvPusher, Push, SpentTickets
from kv_transfer.handoff.reservation_table import Reservation
from tests.support.handoff import coordinator_side
from tests.support.handoff.explorer import Counterexample
from tests.support.handoff.states import Setting
from tests.support.handoff.world import World

DOCS = Path(__file__).parents[4] / "docs/internals/handoff.md"

TWO_REQUESTS = Setting(needs=(2, 1), attempts=1, faults=1, deadline=1)
"""Two requests on three blocks and two prefill workers, and a crash at any point."""
RESUMED = Setting(needs=(2,), attempts=2, faults=1)
"""One request that is resumed on either prefill worker, and a crash at any point."""
TWO_CRASHES = Setting(needs=(2,), attempts=2, faults=2, deadline=1)
"""One request that is resumed, and two crashes."""


def _explored(name: str, setting: Setting) -> None:
    seen = World(setting).explore()
    print(f"\n{name}: {seen.states:,} states, {seen.transitions:,} transitions, {seen.at_rest} at rest")
    row = re.search(rf"^\| {re.escape(name)} \|.*$", DOCS.read_text(), re.MULTILINE)
    assert row is not None, "docs/internals/handoff.md does not have this exploration"
    assert f"| {seen.states:,} |" in row[0], "docs/internals/handoff.md has another number of states"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_requests_and_a_crash() -> None:
    _explored("two requests, a crash", TWO_REQUESTS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_resumed_request_and_a_crash() -> None:
    _explored("a resumed request, a crash", RESUMED)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_resumed_request_and_two_crashes() -> None:
    _explored("a resumed request, two crashes", TWO_CRASHES)


@pytest.mark.slow
def test_the_orders_left_out_change_nothing() -> None:
    """The reduction keeps the states at rest."""
    full, reduced = (
        World(Setting(needs=(1, 1), attempts=1, faults=0, deadline=1, eager=eager)).explore()
        for eager in (False, True)
    )
    assert reduced.at_rest == full.at_rest
    assert reduced.states < full.states


def _nothing(*_: object) -> None:
    pass


def _no_quarantine(entry: Reservation, _: float) -> None:
    entry.quarantine_end_s = 0.0


def _no_grace(entry: Reservation, lost_s: float) -> None:
    entry.writer_lost = True
    entry.writer_end_s = entry.quarantine_end_s = lost_s


ONE = Setting(needs=(2,), attempts=1, faults=1)
MAY_ARRIVE = "may arrive in blocks that are not its own"
FAULTS: dict[str, tuple[Setting, Any, str, Any, str]] = {
    "the quarantine is forgotten": (ONE, Reservation, "start_quarantine", _no_quarantine, MAY_ARRIVE),
    "blocks are released without proof": (
        ONE, coordinator_side, "release_of", lambda *_, **__: DecodeRelease.NO_WRITER, MAY_ARRIVE,
    ),
    "a used ticket is taken again": (ONE, SpentTickets, "spend", lambda *_: True, MAY_ARRIVE),
    "a dead worker's ticket is taken by its next boot": (RESUMED, KvTicket, "require_writer", _nothing, MAY_ARRIVE),
    "a write in doubt is called drained": (
        ONE, Push, "in_doubt", property(lambda _: False, _nothing), MAY_ARRIVE,
    ),
    "the writer does not heed its deadline": (
        ONE, KvPusher, "_enforce_deadline", _nothing, "posted after its ticket's deadline",
    ),
    "the ticket's travel is not allowed for": (ONE, reservation_table, "WRITE_GRACE_S", 2.5, MAY_ARRIVE),
    "the end of a process is thought to end its bytes": (ONE, Reservation, "lose_writer", _no_grace, MAY_ARRIVE),
    "time frees nothing": (
        ONE, Reservation, "due_s", property(lambda _: float("inf")), "left on the decode worker",
    ),
    "a push that must stop goes on": (
        ONE, Push, "stopped", property(lambda _: False), "posted after its ticket's deadline",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines damaged on purpose: each damage has a counterexample."""
    setting, owner, attribute, damaged, problem = FAULTS[name]
    monkeypatch.setattr(owner, attribute, damaged)
    with pytest.raises(Counterexample, match=problem) as found:
        World(setting).explore()
    print(f"\n{name}:\n{found.value}")
    assert len(found.value.trace) > 3
