"""Neutral workers of classes of several models on one account: one claim for both sides, and no limit is exceeded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autoscaler.classes.neutral.neutral_claim import NEUTRAL
from autoscaler.decide import make_decide
from autoscaler.sharing.claims.shares import GPUS, MONEY, of_class, of_kind
from autoscaler.snapshot import POOLS
from tests.support.classes.shared_neutral import Kind, NeutralModel, NeutralModels, all_fit
from tests.support.scaling.snapshots import snapshot

X, Y = of_class("x"), of_class("y")
H100 = of_kind("H100")
XS = {"x": Kind()}
BOTH = {"x": Kind(), "y": Kind(prefill=3.0, decode=2.0, price=2.0, gpus=2)}


def models(limits: dict[str, float], **wishes: tuple[int, int]) -> NeutralModels:
    return NeutralModels({name: NeutralModel(*wish, BOTH) for name, wish in wishes.items()}, limits)


def test_a_change_of_sides_of_one_model_leaves_nothing_to_the_others() -> None:
    """The second wants more than there is. What the first moves from side to side stays the first's."""
    found = NeutralModels({"a": NeutralModel(3, 1, XS), "b": NeutralModel(3, 3, XS)}, {X: 8.0})
    assert found.settle()
    a, b = found.models["a"], found.models["b"]
    assert a.has_all
    assert len(b.workers) == 4
    a.prefill, a.decode = 1, 3
    starts = found.done["Start"]
    assert found.settle()
    assert a.has_all
    assert len(b.workers) == 4
    assert found.done["Start"] == starts, "nothing was started: sides changed"
    assert found.done["Lean"] >= 2


def test_what_is_short_is_shared_and_said() -> None:
    found = models({MONEY: 8.0}, a=(6, 6), b=(6, 6))
    assert found.settle()
    assert found.used()[MONEY] == pytest.approx(8.0)
    for one in found.models.values():
        assert one.units("prefill") >= 1
        assert one.units("decode") >= 1
        assert one.plan is not None
        assert "within a budget of 8 an hour" in one.plan.prefill.reason + one.plan.decode.reason
        assert set(one.plan.claims) == {NEUTRAL}


def test_a_model_that_wants_less_gives_to_one_that_wants_more() -> None:
    found = models({MONEY: 6.0}, a=(5, 3), b=(1, 1))
    assert found.settle()
    a, b = found.models["a"], found.models["b"]
    before = a.units("prefill") + a.units("decode")
    a.prefill, a.decode, b.prefill, b.decode = 1, 1, 5, 3
    assert found.settle()
    assert a.has_all
    assert b.units("prefill") + b.units("decode") >= before - 1
    assert found.settle(), "nothing moves to and fro"


def test_models_that_wait_for_each_others_full_classes_swap_them() -> None:
    """Each has all of the class that the other is fast on; all fits once they have swapped."""
    fast_y, fast_x = {"x": Kind(), "y": Kind(2, 2)}, {"x": Kind(2, 2), "y": Kind()}
    a, b = NeutralModel(4, 4, fast_y), NeutralModel(4, 4, fast_x)
    for pool in ("prefill", "decode"):
        for _ in range(2):
            a.add(pool, "x")  # type: ignore[arg-type]
            b.add(pool, "y")  # type: ignore[arg-type]
    found = NeutralModels({"a": a, "b": b}, {X: 4.0, Y: 4.0})
    assert found.settle()
    assert a.has_all
    assert b.has_all


def test_one_limit_of_a_class_within_a_model_is_kept_beside_that_of_all() -> None:
    few = {"x": Kind(most=3), "y": Kind(price=5.0)}
    found = NeutralModels({"a": NeutralModel(4, 4, few), "b": NeutralModel(1, 1, few)}, {X: 9.0, Y: 9.0})
    assert found.settle()
    assert all(one.has_all for one in found.models.values())
    assert sum(one.replica_class == "x" for one in found.models["a"].workers) == 3


@pytest.mark.parametrize("limit", [GPUS, MONEY, H100])
@pytest.mark.parametrize("others", [0, 1])
def test_one_ladder_for_what_is_limited_whatever_it_is_called(limit: str, others: int) -> None:
    """A replica takes one of each of the three. One of x for prefill leaves four of y, which carry all of decode."""
    kinds = {"x": Kind(gpu="H100"), "y": Kind(1.0, 4.0, gpu="H100")}
    wishes = {"a": NeutralModel(12, 16, kinds)} | {f"b{n}": NeutralModel(1, 1, kinds) for n in range(others)}
    found = NeutralModels(wishes, {limit: 5.0 + 2 * others})
    assert found.settle()
    a = found.models["a"]
    assert (a.units("prefill"), a.units("decode")) == (1, 16)
    assert all(one.has_all for name, one in found.models.items() if name != "a")


def test_alone_a_budget_of_gpus_counts_also_where_a_class_is_what_is_short() -> None:
    model = NeutralModel(
        10, 1, {"x": Kind(price=3.0, gpus=4, most=2), "y": Kind(prefill=2.0, gpus=2, most=2)}
    )
    policy, empty = model.policy().model_copy(update={"gpu_budget": 6}), snapshot(1000.0, acting=True)
    pools = {pool: replace(empty.pool(pool), replicas=(), classes={}) for pool in POOLS}
    plan, _ = make_decide(policy)(None, replace(empty, **pools))  # type: ignore[arg-type]
    assert plan.decode.desired == 1
    assert plan.prefill.desired >= 1


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, NeutralModel], dict[str, float]]:
    limits = {name: float(draw(st.integers(2, 5))) for name in (X, Y)}
    kinds = {
        "x": Kind(price=1.0, gpus=1, gpu="H100"),
        "y": Kind(
            draw(st.sampled_from([1.0, 2.0, 3.0])), draw(st.sampled_from([1.0, 2.0])), 2.5, 2, gpu="H100"
        ),
    }
    found, left = {}, dict(limits)
    for name in ("a", "b"):
        some = draw(st.sampled_from([("x",), ("x", "y")]))
        one = NeutralModel(
            draw(st.integers(1, 4)), draw(st.integers(1, 4)), {kind: kinds[kind] for kind in some}
        )
        for kind in some:
            for _ in range(draw(st.integers(0, 2))):
                if left[of_class(kind)] >= 1:
                    left[of_class(kind)] -= 1
                    one.add(draw(st.sampled_from(["prefill", "decode"])), kind)
        found[name] = one
    there = [kinds[each.replica_class] for one in found.values() for each in one.workers]
    budget = draw(st.sampled_from([(), (MONEY,), (GPUS,), (H100,), (MONEY, GPUS), (MONEY, H100)]))
    more = draw(st.integers(1, 8))
    if MONEY in budget:
        limits[MONEY] = sum(one.price for one in there) + more
    for name in {GPUS, H100} & set(budget):
        limits[name] = float(sum(one.gpus for one in there) + more)
    return found, limits


@pytest.mark.slow
@settings(max_examples=25, deadline=None, phases=[Phase.generate])
@given(worlds())
def test_no_limit_is_exceeded_and_what_fits_is_reached(
    world: tuple[dict[str, NeutralModel], dict[str, float]],
) -> None:
    wanted, limits = world
    found = NeutralModels(wanted, limits)
    if all_fit(wanted, limits):
        assert found.settle()
        assert all(one.has_all for one in wanted.values())
    else:
        for _ in range(12):
            found.round()
