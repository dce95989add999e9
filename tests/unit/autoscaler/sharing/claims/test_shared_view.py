"""What each model may have by its own reckoning where some have standbys: all reckon alike, and nobody is starved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoscaler.sharing.claims.shared_view import ModelShare, SharedView
from autoscaler.sharing.claims.shares import GPUS, Claim, ClassOfClaim, Rung, Uses, of_class

H, X, Y, Z = (of_class(name) for name in ("h100", "x", "y", "z"))


def want(count: int, has: int, standbys: int = 0) -> Claim:
    """So many h100, decided as `has` and `standbys`."""
    rungs = tuple(Rung(n, {H: float(n)}, 1.0 if n == count else 0.5) for n in range(1, count + 1))
    return Claim(rungs, classes={H: ClassOfClaim()}, wanted={H: float(has)}, standbys={H: float(standbys)})


def seen_by(model: str, claims: Mapping[str, Claim], live: Mapping[str, Uses], limits: Uses) -> SharedView:
    return SharedView(
        model,
        limits,
        dict(live),
        {(name, "decode"): uses for name, uses in live.items()},
        {(name, "decode"): claim for name, claim in claims.items() if name != model},
        decided={"decode": wanted} if (wanted := claims[model].wanted) is not None else {},
    )


def test_standbys_of_two_models_do_not_keep_a_third_from_what_it_serves_with() -> None:
    claims = {"a": want(1, 1, 1), "b": want(1, 1, 1), "c": want(2, 1)}
    live = {"a": {H: 2.0}, "b": {H: 2.0}, "c": {H: 1.0}}
    found = {
        name: seen_by(name, claims, live, {H: 5.0}).granted({"decode": claim})
        for name, claim in claims.items()
    }
    assert [one.rungs for one in found.values()] == [(0,), (0,), (1,)]
    assert [one.left[H] for one in found.values()] == [1.0, 0.0, 0.0], "one of them keeps its standby"


def swap(model: str, standby: Uses, units: float = 2.0) -> dict[str, str]:
    """Two that want each other's class, of which there is one each; what is there does not do the work."""
    classes = {name: ClassOfClaim(usable=name == Z) for name in (X, Y, Z)}
    claims = {
        name: Claim((Rung(units, {to: 1.0}, 1.0),), weight, classes, wanted={to: 1.0})
        for name, to, weight in (("a", Y, 1.0), ("b", X, 2.0))
    }
    claims["a"] = replace(claims["a"], standbys=standby)
    live = {"a": {X: 1.0, **standby}, "b": {Y: 1.0}}
    view = seen_by(model, claims, live, {X: 1.0, Y: 1.0})
    granted = {(name, "decode"): claim.rungs[0] for name, claim in claims.items()}
    given = view.gives_way({"decode": claims[model]}, ModelShare((0,), {}, False, granted))
    return {pool: one.name for pool, one in given.items()}


def test_one_of_a_circle_gives_way_also_with_a_standby() -> None:
    for standby in ({}, {Z: 1.0}):
        assert swap("a", standby, 1.0) == {"decode": X}
        assert swap("b", standby, 1.0) == {}
    assert swap("a", {Z: 1.0}) == {"decode": X}, "nothing carries what is wanted"


def test_a_planned_standby_is_not_too_much() -> None:
    """The second has y on standby, and lacks x: it is in no circle, and what it may keep of y others decide."""
    classes = {name: ClassOfClaim(usable=False) for name in (X, Y)}
    claims = {
        "a": Claim((Rung(1, {Y: 1.0}, 1.0),), 1.0, classes, wanted={Y: 1.0}),
        "b": Claim((Rung(1, {X: 1.0}, 1.0),), 1.0, classes, wanted={X: 1.0}, standbys={Y: 1.0}),
    }
    granted = {(name, "decode"): claim.rungs[0] for name, claim in claims.items()}
    for name, claim in claims.items():
        view = seen_by(name, claims, {"a": {X: 1.0}, "b": {Y: 1.0}}, {X: 1.0, Y: 1.0})
        assert view.gives_way({"decode": claim}, ModelShare((0,), {}, False, granted)) == {}


def test_nothing_ends_for_a_model_that_has_not_decided_lately() -> None:
    """What it has is on the account as no pool's: it waits for nothing. A pool that waits for a GPU does."""
    classes = {X: ClassOfClaim(gpus=2), Y: ClassOfClaim(gpus=1)}
    wide, narrow = {X: 1.0, GPUS: 2.0}, {Y: 1.0, GPUS: 1.0}
    mine = Claim((Rung(1, narrow, 1.0),), 1.0, classes, wanted=narrow)
    for pool, given in (("", {}), ("decode", {"decode": X})):
        others = {("b", pool): Claim((Rung(0, {GPUS: 1.0}, 0.0),))}
        view = SharedView("a", {GPUS: 2.0}, {}, {("a", "decode"): wide}, others)
        granted = {("a", "decode"): mine.rungs[0], ("b", pool): others["b", pool].rungs[0]}
        found = view.gives_way({"decode": mine}, ModelShare((0,), {}, False, granted, moved=True))
        assert {name: one.name for name, one in found.items()} == given
