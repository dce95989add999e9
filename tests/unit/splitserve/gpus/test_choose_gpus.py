"""Which GPUs a replica gets: known machines, and what holds for all."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.errors import FailedPreconditionError, ResourceExhaustedError
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.placement import GpuUse, choose_gpus, taken

PAIRS = GpuInventory.of_groups([["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]])
SWITCH = GpuInventory.of_groups([list("01234567")])
SLICES = GpuInventory.of_groups([["MIG-a"], ["MIG-b"], ["MIG-c"]])


def uses(*given: str, pool: str = "decode") -> list[GpuUse]:
    """A replica for each text, such as "0,1"."""
    return [GpuUse(pool, tuple(text.split(","))) for text in given]


@pytest.mark.parametrize(
    ("inventory", "in_use", "count", "chosen"),
    [
        (PAIRS, [], 1, ("0",)),
        (PAIRS, ["2"], 1, ("3",)),  # rather the rest of a pair than half of a whole one
        (PAIRS, ["0"], 2, ("2", "3")),
        (PAIRS, ["0", "2", "4"], 2, ("6", "7")),
        (PAIRS, ["0", "2", "4", "6"], 2, ("1", "3")),  # no pair is left
        (PAIRS, ["0"], 4, ("2", "3", "4", "5")),
        (PAIRS, ["0", "2"], 4, ("4", "5", "6", "7")),
        (SWITCH, ["0", "5"], 4, ("1", "2", "3", "4")),
        (SWITCH, [], 8, tuple("01234567")),
        (SLICES, ["MIG-a"], 1, ("MIG-b",)),
        (PAIRS, ["0,1", "6"], 0, ()),
    ],
)
def test_known_machines(
    inventory: GpuInventory, in_use: list[str], count: int, chosen: tuple[str, ...]
) -> None:
    assert choose_gpus(inventory, uses(*in_use), "decode", count) == chosen


def test_a_ring_of_links_is_kept_together() -> None:
    """Links need not be transitive, as on machines with four links a GPU."""
    ring = frozenset(frozenset((str(n), str((n + 1) % 8))) for n in range(8))
    inventory = GpuInventory(tuple("01234567"), ring)
    assert choose_gpus(inventory, uses("3"), "decode", 3) == ("0", "1", "2")


@pytest.mark.parametrize(
    ("in_use", "count", "words"),
    [
        (["0,1,2,3,4,5,6,7"], 1, "none of the 8 GPUs is free"),
        (["0,1,2,3,4,5,6"], 2, "1 of the 8 GPUs is free, a replica takes 2"),
        (["0,1,2,3,4"], 4, "3 of the 8 GPUs are free, a replica takes 4"),
    ],
)
def test_too_few_are_free(in_use: list[str], count: int, words: str) -> None:
    with pytest.raises(ResourceExhaustedError, match=words) as caught:
        choose_gpus(PAIRS, uses(*in_use), "prefill", count)
    assert caught.value.reason == "NO_GPU"


def test_slices_of_gpus_make_no_group() -> None:
    with pytest.raises(FailedPreconditionError, match="only one MIG slice") as caught:
        choose_gpus(SLICES, [], "decode", 2)
    assert caught.value.reason == "MIG_GROUP"
    mixed = GpuInventory(("MIG-a", "GPU-b", "GPU-c"))
    assert choose_gpus(mixed, [], "decode", 2) == ("GPU-b", "GPU-c")


def test_a_gpu_known_by_its_uuid_is_in_use_all_the_same() -> None:
    inventory = GpuInventory(("0", "1"), aliases={"GPU-a": "0", "GPU-b": "1"})
    assert choose_gpus(inventory, uses("GPU-a"), "decode", 1) == ("1",)


def test_sharing_puts_a_prefill_and_a_decode_replica_on_each_gpu() -> None:
    inventory = GpuInventory.of_groups([["0", "1"]], replicas_per_gpu=2)
    there: list[GpuUse] = []
    for pool in ("prefill", "prefill", "decode", "decode"):
        there.append(GpuUse(pool, choose_gpus(inventory, there, pool, 1)))
    assert [use.gpus for use in there] == [("0",), ("1",), ("0",), ("1",)]
    assert taken(inventory, there) == inventory.capacity == 4
    with pytest.raises(ResourceExhaustedError):
        choose_gpus(inventory, there, "decode", 1)


MIXED = GpuInventory.listed("H100=0;L40S=1,2;H100=3;L40S=4,5;MIG 3g.40gb=MIG-a,MIG-b")


@pytest.mark.parametrize(
    ("kind", "in_use", "count", "chosen"),
    [
        ("H100", [], 1, ("0",)),
        ("H100", ["0"], 1, ("3",)),
        ("H100", [], 2, ("0", "3")),
        ("L40S", ["1"], 2, ("4", "5")),
        ("MIG 3g.40gb", [], 1, ("MIG-a",)),
        ("", [], 2, ("1", "2")),  # one kind, linked
        ("", ["1", "5"], 2, ("0", "3")),  # one kind before the order
        ("H100", ["0,3"], 0, ()),
    ],
)
def test_a_replica_gets_gpus_of_its_kind(
    kind: str, in_use: list[str], count: int, chosen: tuple[str, ...]
) -> None:
    assert choose_gpus(MIXED, uses(*in_use), "decode", count, kind) == chosen


def test_free_gpus_are_counted_by_kind() -> None:
    with pytest.raises(ResourceExhaustedError, match="none of the 2 GPUs of the kind 'H100' is free"):
        choose_gpus(MIXED, uses("0", "3"), "decode", 1, "H100")
    with pytest.raises(FailedPreconditionError) as caught:
        choose_gpus(MIXED, [], "decode", 2, "MIG 3g.40gb")
    assert caught.value.reason == "MIG_GROUP"
    with pytest.raises(FailedPreconditionError) as caught:
        choose_gpus(MIXED, [], "decode", 1, "B200")
    assert caught.value.reason == "GPU_KIND"


@st.composite
def machines(draw: st.DrawFn) -> GpuInventory:
    """1, 2, 4 or 8 GPUs in groups of one size, some of them cut into slices."""
    count = draw(st.sampled_from([1, 2, 4, 8]))
    size = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= count]))
    names = [str(n) for n in range(count)]
    groups = [names[start : start + size] for start in range(0, count, size)]
    groups += [[f"MIG-{n}"] for n in range(draw(st.integers(0, 3)))]
    return GpuInventory.of_groups(groups, draw(st.integers(1, 3)))


ORDERS = st.lists(
    st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(0, 4), st.booleans()), max_size=24
)


@given(machines(), ORDERS)
def test_no_gpu_has_more_replicas_than_allowed(
    inventory: GpuInventory, orders: list[tuple[str, int, bool]]
) -> None:
    """Over starts and ends: each replica has as many different GPUs as it was to have, none is given too often, what
    ends is free again, and only a shortage refuses."""
    there: list[GpuUse] = []
    for pool, count, ends in orders:
        if ends and there:
            there.pop(0)
        users = {gpu: sum(gpu in use.gpus for use in there) for gpu in inventory.gpus}
        free = [gpu for gpu in inventory.gpus if users[gpu] < inventory.replicas_per_gpu]
        whole = [gpu for gpu in free if not gpu.startswith("MIG-")]
        able = len(free) if count == 1 else len(whole)
        try:
            chosen = choose_gpus(inventory, there, pool, count)
        except (ResourceExhaustedError, FailedPreconditionError):
            assert able < count
            continue
        assert able >= count
        assert len(set(chosen)) == len(chosen) == count
        assert set(chosen) <= set(free)
        there.append(GpuUse(pool, chosen))
        assert taken(inventory, there) <= inventory.capacity
    for gpu in inventory.gpus:
        assert sum(gpu in use.gpus for use in there) <= inventory.replicas_per_gpu


@given(machines(), st.sets(st.integers(0, 7)), st.integers(1, 4))
def test_a_whole_group_is_taken_where_there_is_one(
    inventory: GpuInventory, used: set[int], count: int
) -> None:
    there = [GpuUse("prefill", (str(n),)) for n in used if str(n) in inventory.gpus]
    unused = [gpu for gpu in inventory.gpus if not any(gpu in use.gpus for use in there)]

    def linked(gpus: tuple[str, ...]) -> bool:
        return all(frozenset(pair) in inventory.links for pair in combinations(gpus, 2))

    possible = [gpus for gpus in combinations(unused, count) if linked(gpus)]
    if possible:
        chosen = choose_gpus(inventory, there, "decode", count)
        assert linked(chosen)
        assert set(chosen) <= set(unused), "sharing is for when nothing else is free"


@given(machines(), st.integers(0, 4), st.randoms())
def test_the_choice_depends_on_who_has_what_alone(
    inventory: GpuInventory, count: int, random: object
) -> None:
    there = [GpuUse("decode", (gpu,)) for gpu in inventory.gpus[::2]]
    shuffled = list(there)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def outcome(given_uses: list[GpuUse]) -> object:
        try:
            return choose_gpus(inventory, given_uses, "prefill", count)
        except (ResourceExhaustedError, FailedPreconditionError) as error:
            return error.message

    assert outcome(there) == outcome(shuffled)
