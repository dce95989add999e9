"""The registry: which workers are accepted, refused and dropped, and who is notified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from coordinator.workers.registration import MAX_REPLACED
from coordinator.workers.registry import Registry
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from splitserve.v1 import registry_pb2
from tests.support.cluster.registrations import BLOCK_SIZE, registration
from tests.support.waiting import PATIENCE_S

PREFILL, DECODE = registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE


def report(worker_id: str, epoch: int = 1, **fields: object) -> registry_pb2.ReportRequest:
    return registry_pb2.ReportRequest(worker_id=worker_id, epoch=epoch, **fields)  # type: ignore[arg-type]


def connected_pair() -> Registry:
    registry = Registry(5.0)
    registry.register(registration("p0", PREFILL), 0.0)
    decode = registry.register(registration("d0", DECODE), 0.0)
    registry.report(report("d0"), 0.0)
    registry.set_output_open(decode.key, True)
    registry.report(report("p0", connected_agent_ids=[decode.agent_id]), 0.0)
    return registry


def ready(registry: Registry) -> list[str]:
    snapshot = registry.snapshot()
    return [worker.worker_id for worker in snapshot.workers if snapshot.is_ready(worker)]


@pytest.fixture
def registry() -> Registry:
    return connected_pair()


def test_a_pair_is_ready_once_connected_reported_and_streaming(registry: Registry) -> None:
    assert ready(registry) == ["d0", "p0"]
    registry.set_output_open(("d0", 1), False)
    assert ready(registry) == []


def test_a_decode_worker_outlives_its_report_stream_while_its_output_stream_is_open(
    registry: Registry,
) -> None:
    registry.report_ended(("d0", 1))
    assert ready(registry) == []
    registry.report(report("d0"), 1.0)
    assert ready(registry) == ["d0", "p0"]
    registry.report_ended(("d0", 1))
    registry.expire(7.0)
    assert registry.get(("d0", 1)) is None


@pytest.mark.parametrize("report_ends_first", [False, True])
def test_a_decode_worker_without_any_stream_is_dropped(report_ends_first: bool, registry: Registry) -> None:
    if report_ends_first:
        registry.report_ended(("d0", 1))
    registry.set_output_open(("d0", 1), False)
    registry.report_ended(("d0", 1))
    assert registry.get(("d0", 1)) is None


def test_a_prefill_worker_is_dropped_with_its_report_stream(registry: Registry) -> None:
    registry.report_ended(("p0", 1))
    assert registry.get(("p0", 1)) is None


def test_snapshots_do_not_change(registry: Registry) -> None:
    before = registry.snapshot()
    registry.report(report("p0", draining=True), 1.0)
    registry.drop(("d0", 1), "test")
    assert [worker.worker_id for worker in before.workers] == ["d0", "p0"]
    assert not before.workers[1].draining


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "cd" * 32),
        ("dtype", "bfloat16"),
        ("block_size_tokens", 8),
        ("block_size_tokens", 24),
        ("block_size_tokens", 32),
        ("axis_order", "head,layer,kv,token,dim"),
        ("num_layers", 3),
        ("num_kv_heads", 4),
        ("head_dim", 16),
        ("engine_version", "2"),
    ],
)
def test_another_layout_is_refused_by_name(field: str, value: object, registry: Registry) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        registry.register(registration("d1", DECODE, **{field: value}), 0.0)
    assert (caught.value.reason, caught.value.field) == ("LAYOUT_MISMATCH", field)
    assert field in caught.value.message
    assert len(registry.snapshot().workers) == 2
    assert registry.known_models()["words"].block_size_tokens == BLOCK_SIZE


def test_another_transport_is_refused(registry: Registry) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        registry.register(registration("d1", DECODE, transport="ucx"), 0.0)
    assert caught.value.reason == "TRANSPORT_MISMATCH"


def test_another_model_may_have_another_layout(registry: Registry) -> None:
    registry.register(registration("d1", DECODE, model="other", dtype="bfloat16", transport="ucx"), 0.0)
    assert sorted(registry.known_models()) == ["other", "words"]


def test_a_lone_workers_new_boot_may_change_everything() -> None:
    registry = Registry(5.0)
    registry.register(registration("d0", DECODE), 0.0)
    registry.register(registration("d0", DECODE, epoch=2, dtype="bfloat16"), 0.0)
    assert [worker.epoch for worker in registry.snapshot().workers] == [2]


Damage = Callable[[registry_pb2.RegisterRequest], None]


def _set(path: str, value: object) -> Damage:
    def damage(request: registry_pb2.RegisterRequest) -> None:
        target: object = request
        *parents, last = path.split(".")
        for name in parents:
            target = getattr(target, name)
        setattr(target, last, value)

    return damage


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", ""),
        ("worker_id", "x" * 65),
        ("worker_id", "a b"),
        ("worker_id", "a\n"),
        ("epoch", 0),
        ("role", 0),
        ("address", ""),
        ("address", "nohost"),
        ("address", "host:0"),
        ("address", "host:99999"),
        ("model.name", ""),
        ("model.name", "x" * 129),
        ("model.tokenizer_source", ""),
        ("model.context_tokens", 0),
        ("model.context_tokens", 2**24 + 1),
        ("model.vocabulary_size", 0),
        ("endpoint.agent_id", "not-a-uuid"),
        ("endpoint.transport", "pigeon"),
        ("endpoint.metadata", b"x" * (2**20 + 1)),
        ("endpoint.block_bytes", 1),
        ("endpoint.num_blocks", 0),
        ("endpoint.probe_blocks", 2**30),
        ("endpoint.host_id", "h" * 65),
        ("endpoint.memory_kind", "TAPE"),
        ("endpoint.layout.model_fingerprint", "ab"),
        ("endpoint.layout.dtype", "float99"),
        ("endpoint.layout.block_size_tokens", 1025),
        ("endpoint.layout.num_layers", 0),
        ("endpoint.layout.head_dim", 5000),
        ("endpoint.layout.engine_version", ""),
        ("endpoint.layout.engine_version", "1" * 129),
        ("endpoint.layout.axis_order", ""),
        ("endpoint.layout.axis_order", "x" * 129),
        ("max_step_tokens", 0),
        ("max_running_requests", 65537),
        ("start.process_seconds", float("nan")),
        ("start.weights_seconds", -1.0),
        ("start.warm_up_seconds", 1e7),
    ],
)
def test_every_field_has_its_bound(field: str, value: object) -> None:
    registry = Registry(5.0)
    request = registration("d0", DECODE)
    _set(field, value)(request)
    with pytest.raises(InvalidArgumentError) as caught:
        registry.register(request, 0.0)
    assert caught.value.field == field
    assert registry.snapshot().workers == ()


def test_an_endpoint_needs_metadata_and_an_address() -> None:
    for field, value in (("metadata", b""), ("base_address", 0)):
        request = registration("d0", DECODE)
        _set(f"endpoint.{field}", value)(request)
        with pytest.raises(InvalidArgumentError, match=field):
            Registry(5.0).register(request, 0.0)


def test_a_new_boot_replaces_the_old_one(registry: Registry) -> None:
    registry.register(registration("d0", DECODE, epoch=2), 0.0)
    assert registry.get(("d0", 1)) is None
    with pytest.raises(NotFoundError) as caught:
        registry.report(report("d0", epoch=1), 0.0)
    assert caught.value.reason == "WORKER_NOT_REGISTERED"
    assert ready(registry) == []


def test_a_replaced_boot_that_still_runs_does_not_take_its_id_back() -> None:
    """Two workers of one id: the one that came last serves, and the other one is told so until it has gone."""
    registry = connected_pair()
    first, second = (registration("d0", DECODE, f"127.0.0.1:{epoch}", epoch=epoch) for epoch in (1, 2))
    registry.register(second, 0.0)
    for _ in range(2):
        with pytest.raises(
            FailedPreconditionError, match=r"another worker .* 'd0' since, from 127.0.0.1:2"
        ) as caught:
            registry.register(first, 1.0)
        assert (caught.value.reason, caught.value.field) == ("WORKER_REPLACED", "worker_id")
    registry.report(report("d0", epoch=2), 1.0)
    registry.register(second, 2.0)
    assert registry.drop(("d0", 2), "its process has ended")
    assert registry.register(first, 3.0).epoch == 1


def test_replaced_boots_are_forgotten_in_the_end() -> None:
    registry = Registry(5.0)
    for epoch in range(1, MAX_REPLACED + 3):
        registry.register(registration("d0", DECODE, epoch=epoch), 0.0)
    with pytest.raises(FailedPreconditionError):
        registry.register(registration("d0", DECODE, epoch=MAX_REPLACED + 1), 1.0)
    assert registry.register(registration("d0", DECODE, epoch=1), 1.0).epoch == 1


def test_an_experimental_engine_is_marked() -> None:
    registry, request = Registry(5.0), registration("p0", PREFILL)
    assert not registry.register(request, 0.0).experimental
    request.epoch, request.experimental = 2, True
    assert registry.register(request, 0.0).experimental


def test_a_worker_says_how_long_it_took_to_start() -> None:
    registry, request = Registry(5.0), registration("p0", PREFILL)
    assert registry.register(request, 0.0).start is None
    request.epoch = 2
    request.start.weights_seconds = 3.0
    worker = registry.register(request, 0.0)
    assert worker.start is not None
    assert worker.start.weights_seconds == 3.0


def test_the_same_boot_may_register_again(registry: Registry) -> None:
    version = registry.version
    registry.register(registration("p0", PREFILL), 9.0)
    assert registry.version == version
    registry.expire(10.0)
    assert [worker.worker_id for worker in registry.snapshot().workers] == ["p0"]


def test_silence_drops_a_worker_even_one_that_never_reported() -> None:
    registry = Registry(5.0)
    registry.register(registration("p0", PREFILL), 0.0)
    registry.register(registration("d0", DECODE), 0.0)
    registry.report(report("d0"), 3.0)
    registry.expire(5.0)
    assert len(registry.snapshot().workers) == 2
    registry.expire(5.1)
    assert [worker.worker_id for worker in registry.snapshot().workers] == ["d0"]
    registry.expire(8.1)
    assert registry.snapshot().workers == ()


def test_time_in_which_the_coordinator_did_not_run_is_no_silence() -> None:
    registry = Registry(5.0)
    registry.register(registration("p0", PREFILL), 0.0)
    registry.expire(20.0, absent_s=18.0)
    assert len(registry.snapshot().workers) == 1
    registry.expire(23.1)
    assert registry.snapshot().workers == ()


def test_draining_never_goes_back(registry: Registry) -> None:
    registry.report(report("d0", draining=True), 1.0)
    registry.report(report("d0", draining=False), 2.0)
    assert registry.snapshot().workers[0].draining
    assert ready(registry) == []


def test_prefill_workers_get_the_decode_workers_of_their_model_only(registry: Registry) -> None:
    registry.register(registration("d1", DECODE), 0.0)
    registry.register(registration("other", DECODE, model="other"), 0.0)
    prefill, decode = registry.get(("p0", 1)), registry.get(("d0", 1))
    assert prefill is not None
    assert decode is not None
    agents = [peer.agent_id for peer in registry.peers_of(prefill)]
    known = {worker.worker_id: worker.agent_id for worker in registry.snapshot().workers}
    assert agents == [known["d0"], known["d1"]]
    assert registry.peers_of(decode) == []


def test_a_model_is_known_after_its_last_worker_and_has_the_least_context() -> None:
    registry = Registry(5.0)
    registry.register(registration("p0", PREFILL, context_tokens=64), 0.0)
    registry.register(registration("d0", DECODE, context_tokens=32), 0.0)
    assert registry.known_models()["words"].context_tokens == 32
    registry.drop(("d0", 1), "test")
    assert registry.known_models()["words"].context_tokens == 64
    registry.drop(("p0", 1), "test")
    assert registry.known_models()["words"].context_tokens == 64


async def test_waiters_wake_on_changes_and_not_on_load(registry: Registry) -> None:
    waiting = asyncio.create_task(registry.wait_change(registry.version))
    await asyncio.sleep(0)
    connected = registry.snapshot().workers[1].connected_agents
    registry.report(
        report("p0", connected_agent_ids=connected, load=registry_pb2.WorkerLoad(waiting_tokens=9)), 1.0
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    registry.drop(("d0", 1), "test")
    assert await asyncio.wait_for(waiting, PATIENCE_S) == registry.version
    assert await registry.wait_change(-1) == registry.version


def test_a_spot_notice_drains_the_worker_and_its_earliest_deadline_stays(registry: Registry) -> None:
    before = registry.version
    for now, left_s in ((1.0, 30), (2.0, 29), (3.0, 29), (9.0, 10)):
        noticed = report("d0")
        noticed.preemption.time_left.FromSeconds(left_s)
        noticed.preemption.source = "aws"
        registry.report(noticed, now)
        assert registry.snapshot().preempted[0].preempted_by_s == {9.0: 19.0}.get(now, 31.0)
    registry.report(report("d0"), 10.0)
    worker = registry.snapshot().preempted[0]
    assert (worker.draining, worker.preempted_in_s(10.0), worker.preempted_in_s(40.0)) == (True, 9.0, 0.0)
    assert registry.version > before
    assert ready(registry) == []
