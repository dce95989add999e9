"""In forecasts what is read from a worker's lower tiers costs its read's time: not its computing, and not nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.admission.entry import Entry
from coordinator.admission.forecast import Forecast, forecast
from coordinator.admission.model_admission import ModelAdmission
from coordinator.admission.prefill_capacity import PrefillPace
from coordinator.admission.prompt_order import PromptOrder
from coordinator.admission.queue import Ahead
from coordinator.request.estimates import Estimates
from coordinator.routing.router import RoutingRequest
from coordinator.routing.scores import pair_cost
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.registry import Registry
from splitserve.generation.kv_blocks import keys_of
from splitserve.v1 import registry_pb2
from tests.support.clients.admission_parts import admission, entry, worker
from tests.support.cluster.registrations import registration
from tests.unit.coordinator.request.test_estimates import inference_request

BLOCK, BLOCKS, RATE = 16, 20, 1000.0
PROMPT = BLOCKS * BLOCK + 1
NAMES = b"".join(number.to_bytes(8, "little") for number in range(1, BLOCKS + 1))


def one_worker(**settings: object) -> ModelAdmission:
    """Of 10,000 tokens a second."""
    return admission((worker("p0", "prefill"),), **settings)


def forecast_of(model: ModelAdmission, one: Entry, ahead: float = 0.0) -> Forecast:
    return forecast(one, Ahead(uncached_tokens=ahead), model.prefill, model.decode, 1.0, 0.0)


def test_a_read_s_time_counts() -> None:
    model = one_worker(prefill_horizon_s=0.1)
    read, computed, held = entry(100, 1, read_s=0.5), entry(10_100, 1), entry(100, 1)
    assert [forecast_of(model, one).ttft_s for one in (read, computed, held)] == pytest.approx(
        [0.51, 1.01, 0.01]
    )


def test_it_goes_on_while_the_prompt_waits_for_its_worker_not_while_it_is_queued_here() -> None:
    model = one_worker(prefill_horizon_s=0.1)
    read = entry(100, 1, read_s=0.08)
    assert forecast_of(model, read, ahead=1000).ttft_s == pytest.approx(0.11), "both take their time at once"
    for read_s, ttft_s in ((0.08, 1.01), (0.3, 1.21)):
        found = forecast_of(model, replace(read, read_s=read_s), ahead=10_000)
        assert (found.queue_s, found.wait_s, found.ttft_s) == pytest.approx((0.9, 1.0, ttft_s))


@pytest.mark.parametrize(
    ("read_s", "changed", "reason"),
    [
        (0.2, {"deadline_s": 1.0}, None),
        (1.0, {"deadline_s": 1.0}, "WOULD_MISS_DEADLINE"),
        (0.2, {"due_s": 1.0, "ttft_slo_s": 1.0}, None),
        (1.0, {"due_s": 1.0, "ttft_slo_s": 1.0}, "WOULD_MISS_SLO"),
        (60.0, {}, None),  # as computing for a minute: it is no wait
    ],
)
def test_one_that_would_be_late_for_its_read_is_refused(
    read_s: float, changed: dict[str, float], reason: str | None
) -> None:
    model = one_worker(prefill_horizon_s=0.1)
    assert model.arrive(entry(2500, 1), 0.0).started
    found = model.arrive(entry(1000, 1, read_s=read_s, **changed), 0.0)
    assert not found.started
    assert (found.refused and found.refused.reason) == reason


def test_triage_knows_whom_a_read_makes_late() -> None:
    pace = PrefillPace(0.0, 0.0, 1e-4, 1e-4)
    soon, read = entry(100, 1, due_s=1.0, number=2), entry(100, 1, due_s=0.9, number=1)
    assert next(PromptOrder().of([read, soon], pace)) is read
    read.read_s = 2.0
    order = PromptOrder()
    assert list(order.of([read, soon], pace)) == [soon, read]


def tiered(
    registry: Registry,
    name: str,
    host: int,
    pool: int,
    disk_gb_per_s: float = 1.0,
    shared_id: int = 0,
    held: int = BLOCKS,
) -> None:
    """A prefill worker that has the first `held` of the prompt's blocks, or all: the first `pool` ready, those up to
    `host` in memory."""
    one = registry.register(registration(name, registry_pb2.POOL_PREFILL), 0.0)
    report = registry_pb2.ReportRequest(worker_id=one.worker_id, epoch=one.epoch)
    places = {
        "stored": NAMES[: 8 * pool],
        "in_host": NAMES[8 * pool : 8 * host],
        "on_disk": NAMES[8 * host : 8 * held],
    }
    report.cache_events.CopyFrom(registry_pb2.CacheEvents(sequence=1, cleared=True, tiered=True, **places))
    speed = one.block_bytes / 1e9
    report.load.CopyFrom(
        registry_pb2.WorkerLoad(
            prefill_tokens_per_second=RATE,
            host_tier=registry_pb2.TierReads(gb_per_second=speed / 0.001),
            disk_tier=registry_pb2.TierReads(
                gb_per_second=disk_gb_per_s * speed / 0.002, shared_id=shared_id
            ),
        )
    )
    registry.report(report, 0.0)


@pytest.fixture
def registry() -> Registry:
    return Registry(1.0)


@pytest.fixture
def estimates(registry: Registry) -> Estimates:
    return Estimates(registry)


def work_of(estimates: Estimates) -> tuple[float, float]:
    keys = {BLOCK: tuple(keys_of(NAMES))}
    found = estimates.of(replace(inference_request(prompt=PROMPT), block_keys=keys), 0.0)
    return found.uncached_tokens, found.read_s


def test_an_estimate_has_the_read_as_routing_predicts_it(registry: Registry, estimates: Estimates) -> None:
    tiered(registry, "p", host=15, pool=4)
    assert work_of(estimates) == (1, pytest.approx(11 * 0.001)), "the disk's are read meanwhile"
    (one,) = registry.snapshot().workers
    hits = registry.prefixes.hits_of({BLOCK: tuple(keys_of(NAMES))}, 0.0)
    request = RoutingRequest("m", PROMPT, needs_decode=False, hits=hits)
    cost = pair_cost(one, None, registry.loads, request, RATE, 0.0, 0.0)
    assert (PROMPT - cost.cached_tokens, cost.read_s) == work_of(estimates)


def test_what_is_computed_sooner_than_read_is_to_be_computed(
    registry: Registry, estimates: Estimates
) -> None:
    tiered(registry, "p", host=15, pool=4, disk_gb_per_s=0.1)  # 20 ms for a block of 16 ms
    assert work_of(estimates) == (1 + 5 * BLOCK, pytest.approx(0.011))


def test_of_several_workers_the_one_that_is_done_first(registry: Registry, estimates: Estimates) -> None:
    tiered(registry, "disk", host=0, pool=0)
    assert work_of(estimates) == (1, pytest.approx(0.04))
    tiered(registry, "host", host=20, pool=0)
    assert work_of(estimates) == (1, pytest.approx(0.02))
    tiered(registry, "most", host=19, pool=19)
    assert work_of(estimates) == (1, pytest.approx(0.002)), "of its last block alone"
    tiered(registry, "all", host=20, pool=20)
    assert work_of(estimates) == (1, 0.0)
    registry.drop(next(w.key for w in registry.snapshot().workers if w.worker_id == "all"), "gone")
    assert work_of(estimates) == (1, pytest.approx(0.002))


def test_nothing_is_read_of_what_nobody_has(registry: Registry, estimates: Estimates) -> None:
    tiered(registry, "p", host=0, pool=0)
    other = replace(inference_request(prompt=PROMPT), block_keys={BLOCK: (7_000, 7_001)})
    found = estimates.of(other, 0.0)
    assert (found.uncached_tokens, found.read_s, found.hits) == (PROMPT, 0.0, PrefixHits())


@pytest.mark.parametrize(("shared_id", "cached", "read_s"), [(7, PROMPT - 1, 0.04), (8, 0, 0.0), (0, 0, 0.0)])
def test_what_another_worker_has_put_into_the_shared_store_is_read(
    registry: Registry, shared_id: int, cached: int, read_s: float
) -> None:
    tiered(registry, "holder", host=BLOCKS, pool=BLOCKS, shared_id=7)
    tiered(registry, "new", host=0, pool=0, held=0, shared_id=shared_id)
    new = next(one for one in registry.snapshot().workers if one.worker_id == "new")
    hits = registry.prefixes.hits_of({BLOCK: tuple(keys_of(NAMES))}, 0.0)
    request = RoutingRequest("m", PROMPT, needs_decode=False, hits=hits)
    cost = pair_cost(new, None, registry.loads, request, RATE, 0.0, 0.0)
    assert (cost.cached_tokens, cost.read_s) == (cached, pytest.approx(read_s))
