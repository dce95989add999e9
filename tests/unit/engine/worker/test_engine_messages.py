"""Load reports of a worker, and the targets of its requests."""

from __future__ import annotations

import pytest

from engine.core.types import EngineLoad, EngineRequest, ModelFacts
from engine.pacing.step_time_fit import PromptFit
from engine.pacing.token_clock import ServiceTargets
from engine.runner.simulated_runner import SimulatedRunner
from engine.tiers.kv_tiers import KvTiers
from engine.tiers.pool_copier import HostPoolCopier
from engine.tiers.stores.block_store import HostStore
from engine.worker.messages import add_tier_reads, engine_request, worker_load
from splitserve.config.engine import EngineConfig
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2, registry_pb2
from tests.support.tiers.shared_rig import FakeMooncake

STOP = generation_pb2.StopParams(max_tokens=1)


def test_a_report_has_the_prompt_fit_in_milliseconds() -> None:
    load = worker_load(EngineLoad(prompt_fit=PromptFit(0.25, 0.5, 0.125, -0.125)))
    fit = load.prompt_fit
    assert (fit.base_ms, fit.token_ms, fit.pair_ms, fit.mixing_ms) == (250, 500, 125, -125)


def test_without_a_fit_the_report_has_none() -> None:
    assert not worker_load(EngineLoad()).HasField("prompt_fit")


def test_a_report_has_the_speed_of_the_tiers_and_what_waits_for_them() -> None:
    tiers = KvTiers(HostPoolCopier(SimulatedRunner(EngineConfig(num_blocks=4)).pool_memory), *stores(1000))
    try:
        load = registry_pb2.WorkerLoad()
        add_tier_reads(load, tiers)
        assert load.host_tier.gb_per_second > load.disk_tier.gb_per_second > 0
        tiers.host.rate.measured(1, 1e-6)
        tiers.host.reading_blocks = 3
        add_tier_reads(load, tiers)
        assert load.host_tier.waiting_bytes == 3000
        assert (load.host_tier.shared_id, load.disk_tier.shared_id) == (0, 0)
    finally:
        tiers.close()
    add_tier_reads(none := registry_pb2.WorkerLoad(), None)
    assert not none.HasField("host_tier")


def test_a_report_names_the_store_that_workers_share() -> None:
    host, _, tokens = stores(1000)
    store = FakeMooncake().store(1000, 8)
    pool = SimulatedRunner(EngineConfig(num_blocks=4)).pool_memory
    tiers = KvTiers(HostPoolCopier(pool), host, store, tokens)
    try:
        add_tier_reads(load := registry_pb2.WorkerLoad(), tiers)
        assert load.disk_tier.shared_id == store.shared_id != 0
        assert load.host_tier.shared_id == 0
    finally:
        tiers.close()


def stores(block_bytes: int) -> tuple[HostStore, HostStore, int]:
    """Two tiers, and the tokens of a block."""
    host, disk = (HostStore(memoryview(bytearray(4 * block_bytes)), block_bytes) for _ in range(2))
    return host, disk, 16


def asked(message: decode_pb2.ReserveRequest | prefill_pb2.PrefillRequest) -> EngineRequest:
    message.timeout.FromSeconds(1)
    facts = ModelFacts(64, 257, frozenset({256}))
    return engine_request(message, engine_id="e", facts=facts, now=100.0, prefill_only=False)


def targeted(**fields: float) -> EngineRequest:
    targets = generation_pb2.ServiceTargets(**fields)
    return asked(decode_pb2.ReserveRequest(request_id="r", token_ids=[1], stop=STOP, targets=targets))


def test_targets_become_times_of_the_engine_s_clock() -> None:
    whole = targeted(tpot_ms=50, ttft_ms=1000, ttft_left_ms=-250).targets
    assert whole == ServiceTargets(tpot_s=0.05, ttft_s=1.0, first_due_s=99.75)
    assert targeted(tpot_ms=50, ttft_left_ms=5).targets == ServiceTargets(tpot_s=0.05)


def test_requests_of_older_coordinators_have_none() -> None:
    assert asked(decode_pb2.ReserveRequest(request_id="r", token_ids=[1], stop=STOP)).targets is None
    assert asked(prefill_pb2.PrefillRequest(request_id="r", token_ids=[1], stop=STOP)).targets is None


def test_prefill_has_them_too() -> None:
    targets = generation_pb2.ServiceTargets(ttft_ms=1000, ttft_left_ms=500)
    message = prefill_pb2.PrefillRequest(request_id="r", token_ids=[1], stop=STOP, targets=targets)
    assert asked(message).targets == ServiceTargets(ttft_s=1.0, first_due_s=100.5)


def test_a_report_counts_late_prompts() -> None:
    assert worker_load(EngineLoad(late_prompts=3)).late_prompts == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tpot_ms", -1.0),
        ("tpot_ms", 5e-324),
        ("ttft_ms", 1e-320),
        ("tpot_ms", 3.7e6),
        ("tpot_ms", float("nan")),
        ("ttft_ms", 1e9),
        ("ttft_left_ms", float("-inf")),
    ],
)
def test_targets_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        targeted(**{name: value})
    assert caught.value.field == f"targets.{name}"
