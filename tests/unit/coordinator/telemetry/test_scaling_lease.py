"""The coordinator's leases: one holder, expiry, fencing, a boot that forgets."""

from __future__ import annotations

import pytest

from coordinator.telemetry.scaling_lease import ScalingLeases
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.v1 import scaling_pb2

FIRST = 5000


def leases(booted_s: float = -1000.0, first: int = FIRST) -> ScalingLeases:
    return ScalingLeases(booted_s, lambda: first)


def asks(
    of: ScalingLeases, holder: str, now: float, valid_s: float = 10.0, number: int = 0, model: str = ""
) -> scaling_pb2.AcquireLeaseResponse:
    request = scaling_pb2.AcquireLeaseRequest(holder=holder, number=number, model=model)
    request.valid_for.FromNanoseconds(round(valid_s * 1e9))
    return of.acquire(request, now)


def stale(of: ScalingLeases, number: int, now: float) -> bool:
    try:
        of.check_plan(number, now)
    except FailedPreconditionError as error:
        return error.reason == "STALE_LEASE"
    return False


def test_one_holds_it_until_it_expires() -> None:
    of = leases()
    first = asks(of, "a", 0.0)
    assert (first.granted, first.number, first.expires_in_seconds) == (True, FIRST, 10.0)
    refused = asks(of, "b", 4.0)
    assert (refused.granted, refused.holder, refused.expires_in_seconds) == (False, "a", 6.0)
    assert asks(of, "a", 9.0, number=first.number).number == first.number
    assert not asks(of, "b", 18.0).granted
    second = asks(of, "b", 19.0)
    assert second.granted
    assert second.number > first.number
    late = asks(of, "a", 19.5, number=first.number)
    assert (late.granted, late.holder) == (False, "b")


def test_only_the_number_in_force_may_plan() -> None:
    of = leases()
    assert not stale(of, 0, 0.0), "nobody holds it, as before there were leases"
    number = asks(of, "a", 0.0).number
    assert stale(of, 0, 1.0)
    assert stale(of, number + 1, 1.0)
    assert not stale(of, number, 1.0)
    assert stale(of, number, 10.0), "over"
    assert not stale(of, 0, 10.0)
    newer = asks(of, "b", 11.0).number
    assert stale(of, number, 12.0)
    assert not stale(of, newer, 12.0)


def test_given_up_it_is_free_at_once() -> None:
    of = leases()
    asks(of, "a", 0.0)
    asks(of, "b", 0.5, valid_s=0.0)
    assert not asks(of, "b", 1.0).granted, "only its holder gives it up"
    asks(of, "a", 1.0, valid_s=0.0)
    assert asks(of, "b", 1.0).granted


def test_a_coordinator_that_has_just_booted_confirms_and_does_not_give() -> None:
    before = leases()
    number = asks(before, "a", 0.0).number
    after = leases(booted_s=2.0)
    waits = asks(after, "b", 3.0)
    assert (waits.granted, waits.number, waits.expires_in_seconds) == (False, 0, 9.0)
    assert asks(after, "a", 4.0, number=number).granted
    assert not stale(after, number, 5.0)
    assert not asks(after, "b", 13.0).granted
    new = asks(after, "b", 14.0)
    assert new.granted
    assert new.number > number


def test_models_are_scaled_side_by_side_and_all_models_by_one() -> None:
    of = leases()
    assert asks(of, "a", 0.0, model="one").granted
    assert asks(of, "b", 0.0, model="two").granted
    assert not asks(of, "c", 0.0).granted, "it would scale both"
    assert not asks(of, "b", 0.0, model="one").granted
    assert asks(of, "c", 10.0).granted
    assert not asks(of, "a", 11.0, model="one").granted


@pytest.mark.parametrize(
    ("holder", "valid_s", "field"),
    [("", 1.0, "holder"), ("x" * 129, 1.0, "holder"), ("a", 601.0, "valid_for")],
)
def test_bounds(holder: str, valid_s: float, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        asks(leases(), holder, 0.0, valid_s)
    assert caught.value.field == field
