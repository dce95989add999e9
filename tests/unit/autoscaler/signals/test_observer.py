"""The observer: windows by differences, several coordinators, restarts, silence, cold starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autoscaler.actuators.actuator import ActualReplica, Presence
from autoscaler.signals.observer import MAX_ENDED, EndedReplicas, Observer
from autoscaler.snapshot import PrefillSignals, ReplicaStart, lead_s
from splitserve.config.engine import MAX_ADAPTERS
from splitserve.errors import UnavailableError
from splitserve.latency_model import DecodeLatency, LatencyModel
from splitserve.v1 import generation_pb2, registry_pb2, scaling_pb2
from tests.support.latency import latency as latency_of
from tests.support.scaling.signal_sources import Clock, FakeSource, names, worker

TTFT, TPOT = scaling_pb2.PHASE_TTFT, scaling_pb2.PHASE_TPOT
WALL_AHEAD_S = 1_000_000.0


class Rig:
    """An observer of two coordinators and an actuator's replicas."""

    def __init__(self, window_s: float = 60.0, model: str = "") -> None:
        self.clock = Clock()
        self.one, self.two = FakeSource("one:1", self.clock), FakeSource("two:1", self.clock)
        self.actual: list[ActualReplica] = []
        self.observer = Observer(
            [self.one, self.two],
            self.replicas,
            model=model,
            window_s=window_s,
            clock=self.clock,
            wall_clock=lambda: self.clock.now + WALL_AHEAD_S,
        )

    async def replicas(self) -> Sequence[ActualReplica]:
        return self.actual

    def order(self, name: str, *, stopping: bool = False) -> None:
        pool = "prefill" if name.startswith("p") else "decode"
        wall_s = self.clock.now + WALL_AHEAD_S
        self.actual.append(ActualReplica(name, pool, stopping, wall_s))  # type: ignore[arg-type]

    async def look(self, after_s: float = 0.0):  # type: ignore[no-untyped-def]
        self.clock.now += after_s
        return await self.observer.observe()


async def test_windows_are_differences_of_all_coordinators() -> None:
    rig = Rig(window_s=30)
    rig.one.took(TTFT, *[9.0] * 50)  # before anybody looked
    first = await rig.look()
    assert first.prefill.ttft is None
    assert first.arrivals == ()
    rig.one.took(TTFT, 0.1, 0.1)
    rig.two.took(TTFT, 0.2)
    assert (await rig.look(10)).prefill.ttft.total == 3
    await rig.look(10)
    rig.two.took(TTFT, 0.4)
    assert (await rig.look(10)).prefill.ttft.total == 4
    seen = await rig.look(10)
    assert seen.prefill.ttft.total == 1, "what is older than the window is gone"
    assert seen.prefill.ttft.percentile(50) == pytest.approx(0.4, rel=0.15)
    assert seen.decode.tpot.total == 0, "no value is not the same as no measurement"


async def test_arrivals_come_in_contiguous_buckets() -> None:
    rig = Rig()
    await rig.look()
    rig.one.arrive(10, prompt_tokens=100)
    rig.two.arrive(5, prompt_tokens=200)
    await rig.look(10)
    rig.one.arrive(1)
    seen = await rig.look(5)
    assert [(b.start_s, b.length_s, b.requests) for b in seen.arrivals] == [(1000, 10, 15), (1010, 5, 1)]
    assert seen.arrivals[0].prompt_tokens == seen.arrivals[0].uncached_tokens == 2000
    assert seen.arrivals[0].output_tokens == pytest.approx(150)


async def test_prompts_of_decode_workers_are_taken_off_what_arrived_and_never_more() -> None:
    rig = Rig()
    await rig.look()
    rig.one.arrive(10)
    rig.one.compute_locally(4)
    seen = await rig.look(5)
    assert [(b.requests, b.prefill_requests, b.uncached_tokens) for b in seen.arrivals] == [(10, 6, 600)]
    rig.one.arrive(1)
    rig.one.compute_locally(5)  # four of them arrived before
    seen = await rig.look(5)
    assert [b.uncached_tokens for b in seen.arrivals] == [200, 0]
    assert [b.prefill_requests for b in seen.arrivals] == [2, 0]
    rig.one.compute_locally(100)  # of requests that arrived before anybody looked
    seen = await rig.look(5)
    assert [b.uncached_tokens for b in seen.arrivals] == [0, 0, 0]
    assert [b.prompt_tokens for b in seen.arrivals] == [1000, 100, 0]


async def test_a_restarted_coordinator_counts_from_zero_and_takes_nothing_back() -> None:
    rig = Rig()
    rig.one.arrive(1000)
    await rig.look()
    rig.one.arrive(7)
    rig.one.took(TTFT, 0.1)
    await rig.look(10)
    rig.clock.now += 4
    rig.one.restart()
    rig.one.arrive(3)
    rig.one.took(TTFT, 0.1, 0.1)
    seen = await rig.look(6)
    assert [bucket.requests for bucket in seen.arrivals] == [7, 3]
    assert seen.prefill.ttft.total == 3


async def test_a_silent_coordinator_is_missing_and_never_zero() -> None:
    rig = Rig(window_s=60)
    rig.two.workers = [worker("p1")]
    await rig.look()
    for _ in range(3):
        rig.one.arrive(10)
        rig.two.arrive(20)
        seen = await rig.look(10)
    assert seen.complete
    rig.two.down = True
    rig.one.arrive(10)
    rig.two.arrive(40)
    seen = await rig.look(10)
    assert not seen.complete
    assert [bucket.requests for bucket in seen.arrivals] == [30, 30, 30, 30], "its mean demand is held"
    assert names(seen.prefill.replicas) == {"p1": "ready"}
    rig.two.down = False
    rig.one.arrive(10)
    rig.two.arrive(40)
    seen = await rig.look(10)
    assert seen.complete
    assert [bucket.requests for bucket in seen.arrivals] == [30, 30, 30, 50, 50], "the truth replaces it"
    rig.two.down = True
    await rig.look(30)
    rig.one.arrive(10)
    seen = await rig.look(40)
    assert not seen.complete
    assert seen.prefill.replicas == (), "after a window its word is too old"
    assert seen.arrivals[-1].requests == 10


async def test_when_nobody_answers_there_is_nothing_to_see() -> None:
    rig = Rig()
    rig.one.down = rig.two.down = True
    with pytest.raises(UnavailableError) as caught:
        await rig.look()
    assert caught.value.reason == "NO_COORDINATOR"


async def test_replicas_of_the_actuator_and_of_the_coordinators_are_one_list() -> None:
    rig = Rig()
    for name in ("p0", "p1", "p2"):
        rig.order(name)
    rig.order("d0", stopping=True)
    load = {"running_requests": 2, "waiting_requests": 1, "waiting_reservations": 4}
    rig.one.workers = [worker("p0", for_s=30), worker("p1", "starting"), worker("d0", load=load)]
    rig.two.workers = [worker("p0", "starting"), worker("d9", "standby")]
    seen = await rig.look(5)
    assert names(seen.prefill.replicas) == {"p0": "ready", "p1": "starting", "p2": "starting"}
    assert names(seen.decode.replicas) == {"d0": "draining", "d9": "standby"}
    assert seen.prefill.replicas[0].since_s == rig.clock.now - 30
    assert seen.prefill.replicas[2].since_s == rig.clock.now - 5
    assert seen.decode.replicas[0].load == 7


async def test_figures_of_the_pools() -> None:
    rig = Rig()
    latency = LatencyModel(decode=DecodeLatency(0.01, 0.001, 0.00001)).to_proto()
    rates = {"latency": latency_of(1000.0)}
    rig.one.workers = [
        worker("p0", load=rates, lane_gb_per_second=2.0, kv_bytes_per_token=512),
        worker("p1", load=rates | {"latency": latency_of(3000.0)}, lane_gb_per_second=4.0),
        worker("p2"),
        worker(
            "d0",
            load={"running_requests": 3, "referenced_blocks": 4, "reserved_blocks": 1, "latency": latency}
            | {"total_blocks": 10, "free_blocks": 5, "waiting_reservations": 2},
            kv_capacity_tokens=160,
        ),
    ]
    rig.one.in_progress = scaling_pb2.InProgress(prefilling_requests=2, prefilling_tokens=300)
    rig.two.in_progress = scaling_pb2.InProgress(prefilling_requests=1, prefilling_tokens=50)
    seen = await rig.look()
    assert (seen.prefill.waiting_requests, seen.prefill.backlog_tokens) == (3, 350)
    assert seen.prefill.tokens_per_s == 2000, "who has not measured does not count"
    assert seen.decode.step == DecodeLatency(0.01, 0.001, 0.00001)
    assert (seen.decode.context_tokens, seen.decode.kv_capacity_tokens) == (80, 160)
    assert (seen.decode.running_requests, seen.decode.waiting_reservations) == (3, 2)
    assert (seen.link.gb_per_s, seen.link.kv_bytes_per_token) == (3.0, 512)
    assert seen.metrics["decode_kv_usage"] == 0.5


async def test_cold_starts_are_measured_from_the_order_and_only_where_seen() -> None:
    rig = Rig()
    rig.order("p0")
    rig.one.workers = [worker("p0")]  # adopted: nobody saw it start
    assert (await rig.look(1)).prefill.cold_start_s is None
    rig.order("p1")
    await rig.look(20)
    rig.one.workers.append(worker("p1", "starting"))
    await rig.look(20)
    rig.one.workers[-1] = worker("p1", "standby", for_s=4)
    assert (await rig.look(5)).prefill.cold_start_s == pytest.approx(41)
    rig.one.workers[-1] = worker("p1", "ready")
    assert (await rig.look(5)).prefill.cold_start_s == pytest.approx(41)


async def test_phases_of_starts_are_medians_of_what_replicas_say() -> None:
    rig = Rig()
    starts = [
        registry_pb2.StartPhases(process_seconds=n, weights_seconds=10, warm_up_seconds=1) for n in (2, 5, 3)
    ]
    rig.one.workers = [worker(f"p{number}", start=start) for number, start in enumerate(starts)]
    rig.one.workers.append(worker("d0"))
    seen = await rig.look(1)
    assert seen.prefill.start == ReplicaStart(3, 10, 1)
    assert seen.decode.start is None
    assert seen.prefill.cold_start_s is None, "what they do not see is missing"


@pytest.mark.parametrize(
    ("measured_s", "reported_s", "planned_s"), [(None, None, 60), (None, 90, 90), (None, 5, 60), (20, 90, 20)]
)
def test_cold_start_that_is_planned_with(
    measured_s: float | None, reported_s: float | None, planned_s: float
) -> None:
    start = None if reported_s is None else ReplicaStart(reported_s - 2, 1, 1)
    assert lead_s(PrefillSignals(cold_start_s=measured_s, start=start), given_s=60) == planned_s


async def test_a_replica_that_was_cut_off_has_not_started_again() -> None:
    rig = Rig()
    rig.order("p1")
    await rig.look(20)
    rig.one.workers = [worker("p1", "ready")]
    took_s = (await rig.look(5)).prefill.cold_start_s
    rig.one.workers = []
    await rig.look(300)
    rig.one.workers = [worker("p1", "ready")]
    assert (await rig.look(5)).prefill.cold_start_s == took_s


async def test_who_was_given_up_counts_only_while_a_coordinator_sees_it() -> None:
    rig = Rig()
    rig.order("p1")
    rig.actual = [replace(rig.actual[0], presence=Presence.GIVEN_UP)]
    rig.one.workers = [worker("p1", "ready")]
    assert [replica.ours for replica in (await rig.look(5)).prefill.replicas] == [True]
    rig.one.workers = []
    assert (await rig.look(5)).prefill.replicas == ()


@pytest.mark.slow
async def test_memory_is_bounded_and_forgets_who_left() -> None:
    rig = Rig(window_s=10)
    rig.observer.keep_history(90)
    for number in range(100):
        rig.actual = []
        rig.order(f"p{number}")
        rig.one.workers = [worker(f"p{number}", "starting")]
        rig.one.arrive(1)
        seen = await rig.look(1)
    assert names(seen.prefill.replicas) == {"p99": "starting"}
    assert len(seen.arrivals) <= 91
    track = rig.observer._tracks["one:1"]
    assert len(track._observations) <= 12
    assert rig.observer._cold_starts._starting == {"p99"}


async def test_workers_of_another_model_are_left_out() -> None:
    rig = Rig(model="m")
    for name in ("p-0", "p-1", "d-0"):
        rig.order(name)
    rig.one.workers = [worker("p-0")]
    rig.one.other_workers = [worker("p-1"), worker("d-0")]
    seen = await rig.look()
    assert names(seen.prefill.replicas) == {"p-0": "ready"}
    assert names(seen.decode.replicas) == {}
    rig.one.other_workers = []
    seen = await rig.look(1)
    assert names(seen.prefill.replicas) == {"p-0": "ready"}, (
        "one that left belongs to the same model as before"
    )
    assert names(seen.decode.replicas) == {}
    rig.one.workers = [worker("p-0"), worker("p-1")]
    seen = await rig.look(1)
    assert names(seen.prefill.replicas) == {"p-0": "ready", "p-1": "ready"}
    assert names(seen.decode.replicas) == {}


async def test_all_models_are_one_unless_one_is_named() -> None:
    rig = Rig()
    rig.one.workers, rig.one.other_workers = [worker("p-0")], [worker("p-1")]
    seen = await rig.look()
    assert sorted(names(seen.prefill.replicas)) == ["p-0", "p-1"]


async def test_whose_a_worker_is_and_whether_it_is_registered() -> None:
    rig = Rig()
    rig.order("p-0")
    rig.order("p-1")
    rig.one.workers = [worker("p-0"), worker("p-9")]
    found = {r.name: (r.ours, r.registered) for r in (await rig.look()).prefill.replicas}
    assert found == {"p-0": (True, True), "p-1": (True, False), "p-9": (False, True)}
    without_actuator = await Observer([rig.one], clock=rig.clock).observe()
    assert [replica.ours for replica in without_actuator.prefill.replicas] == [True, True]


async def test_requests_that_coordinators_hold_for_decode_wait_for_decode() -> None:
    rig = Rig()
    rig.one.workers = [worker("d-0", load={"waiting_reservations": 2})]
    rig.one.in_progress = scaling_pb2.InProgress(reserving_requests=30)
    rig.two.in_progress = scaling_pb2.InProgress(reserving_requests=12)
    assert (await rig.look()).decode.waiting_reservations == 42


async def test_a_longer_history_is_kept_from_now_on() -> None:
    rig = Rig()
    for _ in range(3):
        await rig.look(600)
    assert len((await rig.look(600)).arrivals) == 2
    rig.observer.keep_history(3600)
    await rig.look(600)
    assert len((await rig.look(600)).arrivals) == 4


async def test_what_waits_for_workers_and_whose_model_it_is_comes_from_all_coordinators() -> None:
    rig = Rig()
    assert not (await rig.look()).model_known
    rig.one.in_progress = scaling_pb2.InProgress(admitting_requests=3, waiting_for_workers=2)
    rig.two.in_progress = scaling_pb2.InProgress(decoding_requests=4, waiting_for_workers=1)
    rig.one.served.CopyFrom(registry_pb2.ServedModel(name="m", context_tokens=512))
    seen = await rig.look(5)
    assert (seen.waiting_for_workers, seen.in_progress, seen.model_known) == (3, 7, True)
    rig.one.served.Clear()
    await rig.look(5)
    assert rig.observer.served["m"].context_tokens == 512, "a restarted one is told again"


async def test_the_adapters_of_a_model_add_up() -> None:
    """A coordinator that was restarted knows those of the workers that have registered since."""

    def known(*names: str, digit: str = "1") -> registry_pb2.ServedModel:
        refs = [generation_pb2.AdapterRef(name=name, fingerprint=digit * 64) for name in names]
        return registry_pb2.ServedModel(name="m", context_tokens=512, adapters=refs)

    rig = Rig()
    rig.one.served.CopyFrom(known("red", "blue"))
    rig.two.served.CopyFrom(known())
    await rig.look()
    rig.one.served.CopyFrom(known("blue", digit="2"))
    await rig.look(5)
    found = {one.name: one.fingerprint[0] for one in rig.observer.served["m"].adapters}
    assert found == {"red": "1", "blue": "2"}
    rig.one.served.CopyFrom(known(*(f"a{n}" for n in range(MAX_ADAPTERS))))
    await rig.look(5)
    assert [one.name for one in rig.observer.served["m"].adapters] == [f"a{n}" for n in range(MAX_ADAPTERS)]


async def test_a_worker_with_both_roles_is_in_both_pools() -> None:
    rig = Rig()
    load = {"latency": latency_of(100.0), "running_requests": 2}
    rig.order("d0")
    rig.one.workers = [worker("d0", load=load, role=registry_pb2.ROLE_BOTH, changes_role=True)]
    seen = await rig.look()
    assert (seen.prefill.tokens_per_s, seen.decode.running_requests) == (100.0, 2)
    for pool in (seen.prefill, seen.decode):
        (replica,) = pool.replicas
        assert (replica.both, replica.ours, replica.can_change_role) == (True, True, False)


async def test_a_worker_counts_by_its_role_wherever_it_was_started() -> None:
    rig = Rig()
    rig.order("p0")
    rig.order("p1")
    rig.one.workers = [
        worker("p0", role=registry_pb2.ROLE_DECODE, changes_role=True),
        worker("p1", role=registry_pb2.ROLE_PREFILL),
    ]
    seen = await rig.look()
    (moved,), (stayed,) = seen.decode.replicas, seen.prefill.replicas
    assert (moved.name, moved.ours, moved.can_change_role) == ("p0", True, True)
    assert (stayed.name, stayed.can_change_role) == ("p1", False)
    assert seen.roles == {"p0": "decode", "p1": "prefill"}


async def test_a_worker_with_a_spot_notice_is_preempted() -> None:
    rig = Rig()
    rig.one.workers = [
        worker("p0"),
        worker("d0", "draining", preempted_in_seconds=0.0),
        worker("d1", "draining"),
    ]
    rig.two.workers = [worker("p0"), worker("d0"), worker("d1")]
    snapshot = await rig.look()
    assert names(snapshot.decode.replicas) == {"d0": "preempted", "d1": "draining"}
    assert names(snapshot.prefill.replicas) == {"p0": "ready"}
    rig.order("d0", stopping=True)
    assert names((await rig.look(1)).decode.replicas)["d0"] == "draining"


def test_only_what_was_listed_can_end() -> None:
    ended = EndedReplicas()
    assert ended.look(["p1"], [("p1", 7), ("stranger", 3)]) == ()
    assert ended.look(["p1"], [("p1", 7)]) == ()
    assert ended.look([], []) == (("p1", 7),)
    assert ended.look([], [("stranger", 3)]) == (("p1", 7),), (
        "told again, as a coordinator may have missed it"
    )


def test_a_replica_that_runs_again_is_not_named() -> None:
    ended = EndedReplicas()
    ended.look(["p1"], [("p1", 7)])
    assert ended.look(["p1"], [("p1", 8)]) == ()
    assert ended.look([], []) == (("p1", 7), ("p1", 8))
    assert ended.look(["p1"], [("p1", 9)]) == (("p1", 7), ("p1", 8))


def test_a_boot_seen_just_before_the_list_counts() -> None:
    ended = EndedReplicas()
    ended.look(["p1"], [])
    assert ended.look([], [("p1", 7)]) == (("p1", 7),)
    assert ended.look([], [("p1", 8)]) == (("p1", 7),), "what came after is nothing that the list knew"


def test_memory_is_bounded() -> None:
    ended = EndedReplicas()
    for number in range(2 * MAX_ENDED):
        ended.look([f"p{number}"], [(f"p{number}", 1)])
    assert len(ended.look([], [])) == MAX_ENDED


async def test_the_observer_tells() -> None:
    told: list[Sequence[tuple[str, int]]] = []
    listed = [ActualReplica("p1", "prefill", False, 0.0)]

    async def replicas() -> Sequence[ActualReplica]:
        return listed

    async def on_ended(boots: Sequence[tuple[str, int]]) -> None:
        told.append(boots)

    clock = Clock()
    source = FakeSource("one:1", clock)
    source.workers = [worker("p1", epoch=7)]
    observer = Observer([source], replicas, clock=clock, on_ended=on_ended)
    await observer.observe()
    listed.clear()
    assert told == []
    await observer.observe()
    assert told == [(("p1", 7),)]
