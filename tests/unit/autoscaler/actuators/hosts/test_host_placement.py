"""Where a replica is started: where its lane is best, with all its GPUs on one host."""

from __future__ import annotations

import pytest

from autoscaler.actuators.actuator import Room
from autoscaler.actuators.docker_room import free_room
from autoscaler.actuators.docker_template import HostNetwork, choose_seat
from autoscaler.actuators.hosts.host_placement import HostCandidate, HostLane, choose_host, lane
from splitserve.errors import FailedPreconditionError, ResourceExhaustedError
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.placement import GpuUse
from splitserve.roles import POOLS, PoolName


def host(
    name: str, room: int = 4, prefill: int = 0, decode: int = 0, fabric: str = "", linked: int = 0
) -> HostCandidate:
    return HostCandidate(name, Room(room, linked=linked), {"prefill": prefill, "decode": decode}, fabric)


def test_lanes() -> None:
    a, b, c = host("a", fabric="x"), host("b", fabric="x"), host("c")
    assert (lane(a, a), lane(a, b), lane(a, c), lane(c, host("d"))) == (
        HostLane.SAME_HOST,
        HostLane.RDMA,
        HostLane.TCP,
        HostLane.TCP,
    )


def test_beside_a_peer_without_a_partner() -> None:
    assert choose_host("prefill", [host("a"), host("b", 2, decode=1)]) == "b"
    assert (
        choose_host("decode", [host("a", 3, prefill=1, decode=1), host("b", 1, prefill=2, decode=1)]) == "b"
    )


def test_else_on_the_fabric_of_such_a_peer() -> None:
    full = host("a", room=0, decode=2, prefill=1, fabric="x")
    assert choose_host("prefill", [full, host("b", 9), host("c", 1, fabric="x")]) == "c"


def test_else_where_most_is_free() -> None:
    assert choose_host("decode", [host("a", 1), host("b", 3), host("c", 2)]) == "b"
    assert choose_host("decode", [host("a", 3, prefill=2, decode=2), host("b", 3)]) == "b"
    assert choose_host("decode", [host("a"), host("b")]) == "a"


def test_a_replica_of_linked_gpus_goes_before_its_lane() -> None:
    assert choose_host("decode", [host("a", linked=1), host("b", prefill=1)]) == "a"


def test_replicas_by_turns_give_pairs_on_each_host() -> None:
    there: dict[str, dict[PoolName, int]] = {name: dict.fromkeys(POOLS, 0) for name in ("a", "b")}
    order: tuple[PoolName, ...] = ("prefill", "decode", "decode", "prefill")
    for pool in order:
        candidates = [
            HostCandidate(name, Room(4 - sum(count.values())), dict(count)) for name, count in there.items()
        ]
        there[choose_host(pool, candidates)][pool] += 1
    assert there == {"a": {"prefill": 1, "decode": 1}, "b": {"prefill": 1, "decode": 1}}


def test_no_room_says_why_for_each_host() -> None:
    none = [
        HostCandidate("a", Room(0, "NO_GPU", "none is free")),
        HostCandidate("b", Room(0, "NO_IMAGE", "no image x")),
    ]
    with pytest.raises(ResourceExhaustedError) as caught:
        choose_host("decode", none, ["c"])
    assert caught.value.reason == "NO_ROOM"
    message = "no host has room for a decode replica: a: none is free; b: no image x; c: does not answer"
    assert caught.value.message == message
    with pytest.raises(ResourceExhaustedError) as caught:
        choose_host("decode", none[:1])
    assert caught.value.reason == "NO_GPU"
    with pytest.raises(FailedPreconditionError) as refused:
        choose_host("decode", [HostCandidate("a", Room(0, "NO_TEMPLATE", "nothing to copy"))])
    assert refused.value.reason == "NO_TEMPLATE"


def test_room_is_counted_in_whole_replicas() -> None:
    gpus = GpuInventory.of_groups([["0", "1"], ["2", "3"]])
    assert free_room(gpus, [GpuUse("decode", ("0",))], "decode", 2, None) == Room(1, linked=1)
    assert free_room(gpus, [], "decode", 1, None).replicas == 4
    full = free_room(gpus, [GpuUse("decode", ("0", "1", "2"))], "decode", 2, None)
    assert (full.replicas, full.reason) == (0, "NO_GPU")
    slices = GpuInventory.of_groups([["MIG-a", "MIG-b"]])
    assert free_room(slices, [], "decode", 2, None).reason == "MIG_GROUP"
    assert free_room(GpuInventory(), [GpuUse("decode", ())], "decode", 0, 2) == Room(1)
    assert free_room(GpuInventory(), [GpuUse("decode", ())], "decode", 0, 1).reason == "NO_ROOM"


def test_room_is_counted_by_kind() -> None:
    mixed = GpuInventory.listed("H100=0,1;L40S=2,3,4,5")
    there = [GpuUse("decode", ("0",)), GpuUse("decode", ("2",))]
    assert free_room(mixed, there, "decode", 1, None, "H100") == Room(1)
    assert free_room(mixed, there, "decode", 1, None, "L40S").replicas == 3
    assert free_room(mixed, there, "decode", 1, None).replicas == 4
    assert free_room(mixed, there, "decode", 2, None, "H100").reason == "NO_GPU"
    none = free_room(mixed, there, "decode", 1, None, "B200")
    assert (none.replicas, none.reason) == (0, "GPU_KIND")
    assert free_room(mixed, there, "decode", 0, 8, "B200").replicas == 6, "it takes no GPU"


def test_a_kind_that_no_host_has_is_one_error_that_names_the_field() -> None:
    none = [HostCandidate(name, Room(0, "GPU_KIND", "gpu: none is of it")) for name in "ab"]
    with pytest.raises(FailedPreconditionError) as caught:
        choose_host("decode", none)
    assert (caught.value.reason, caught.value.field) == ("GPU_KIND", "gpu")
    with pytest.raises(ResourceExhaustedError) as full:
        choose_host("decode", [*none, HostCandidate("c", Room(0, "NO_GPU", "none is free"))])
    assert full.value.reason == "NO_GPU", "there is such a host, and it is full"
    with pytest.raises(ResourceExhaustedError) as unknown:
        choose_host("decode", none, ["c"])
    assert unknown.value.reason == "NO_ROOM", "the silent one may have it"


NETWORK = HostNetwork("gpu-a", "10.0.0.1", 20000, 20005)


def test_every_worker_has_ports_of_its_own() -> None:
    used: set[int] = set()
    seats = []
    for number in (1, 1, 1):
        seat = choose_seat(NETWORK, used, number)
        used |= {int(seat.variables[name]) for name in ("SPLITSERVE_PORT", "SPLITSERVE_METRICS_PORT")}
        seats.append(seat)
    assert [seat.variables["SPLITSERVE_PORT"] for seat in seats] == ["20002", "20004", "20000"]
    assert used == set(range(20000, 20006))
    with pytest.raises(ResourceExhaustedError) as caught:
        choose_seat(NETWORK, used)
    assert caught.value.reason == "NO_PORT"


def test_a_seat_names_the_host_and_leads_to_it() -> None:
    seat = choose_seat(NETWORK, set(), 255)
    assert seat.hostname == "gpu-a-0000000000ff"
    assert seat.variables["SPLITSERVE_HOST"] == "10.0.0.1"
    assert seat.variables["SPLITSERVE_ADVERTISE_ADDRESS"] == "10.0.0.1:20000"
    assert choose_seat(HostNetwork("a", "fd00::1", 20000, 20001), set()).variables[
        "SPLITSERVE_ADVERTISE_ADDRESS"
    ] == ("[fd00::1]:20000")
    assert choose_seat(NETWORK, set()).hostname != choose_seat(NETWORK, set()).hostname
