"""When refused registrations end a worker: only if no coordinator ever took it in, and none is left to ask."""

from __future__ import annotations

from splitserve.client.registry_client import RegistrationStatus


def test_one_coordinator() -> None:
    status = RegistrationStatus(["a"])
    assert status.refused("a")
    status = RegistrationStatus(["a"])
    status.accepted("a")
    status.lost("a")
    assert not status.refused("a")
    assert (status.registered, status.refusals) == ({"a": False}, {"a": 1})


def test_two_coordinators_in_any_order() -> None:
    status = RegistrationStatus(["a", "b"])
    assert not status.refused("a")  # b may still say yes
    assert not status.refused("a")
    status.accepted("b")
    assert not status.refused("a")
    assert status.registered == {"a": False, "b": True}
    status.lost("b")
    assert not status.refused("b")


def test_all_refuse() -> None:
    status = RegistrationStatus(["a", "b"])
    assert not status.refused("b")
    status.lost("a")  # was not reached
    assert not status.refused("b")
    assert status.refused("a")
