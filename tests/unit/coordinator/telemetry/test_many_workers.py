"""A scrape of a coordinator with a thousand workers, and what is left of workers that departed."""

from __future__ import annotations

import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.service import Coordinator
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve import metrics
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.v1 import registry_pb2
from tests.support.cluster.registrations import registration
from tests.support.waiting import SLACK_S

PREFILL, DECODE = registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE
LOAD = registry_pb2.WorkerLoad(total_blocks=1000, free_blocks=400, running_requests=8)
LIMIT_S = 1.0


def join(registry: Registry, count: int, models: int = 1) -> list[Worker]:
    """`count` workers of both pools, each prefill worker with a lane to each decode worker of its model."""
    workers = []
    for model in range(models):
        share = count // models // 2
        name = f"model-{model}"
        made = [registration(f"d{model}-{n}", DECODE, model=name) for n in range(share)]
        decode = [registry.register(request, 0.0) for request in made]
        for worker in decode:
            registry.report(report(worker), 0.0)
            registry.set_output_open(worker.key, True)
        agents = [worker.agent_id for worker in decode]
        lanes = [registry_pb2.LaneReport(agent_id=one, gb_per_second=5.0, lane="rdma") for one in agents]
        made = [registration(f"p{model}-{n}", PREFILL, model=name) for n in range(share)]
        prefill = [registry.register(request, 0.0) for request in made]
        for worker in prefill:
            registry.report(report(worker, connected_agent_ids=agents, lanes=lanes), 0.0)
        workers += [*decode, *prefill]
    return workers


def report(worker: Worker, **fields: object) -> registry_pb2.ReportRequest:
    return registry_pb2.ReportRequest(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        load=LOAD,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture
async def coordinator() -> Coordinator:
    return Coordinator(CoordinatorConfig(), load_tokenizer, "coordinator-0")


def scraped(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> tuple[str, float]:
    """The page over HTTP, and the seconds of this process that it took: others may have the cores."""
    ports: list[int] = []
    monkeypatch.setattr(metrics, "log_event", lambda event, **fields: ports.append(fields["port"]))
    with metrics.serving_metrics(coordinator.metrics, "127.0.0.1", 0):
        began = time.process_time()
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/metrics", timeout=SLACK_S) as page:
            text = page.read().decode()
        return text, time.process_time() - began


@pytest.mark.parametrize("models", [pytest.param(1, marks=pytest.mark.slow), 10])
async def test_a_scrape_with_a_thousand_workers_takes_less_than_a_second(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, models: int
) -> None:
    join(coordinator.registry, 1000, models)
    for model in range(models):
        coordinator.stats.of(f"model-{model}")
    pages, times_s = zip(*(scraped(coordinator, monkeypatch) for _ in range(2)), strict=True)
    assert 'splitserve_ready_workers{pool="prefill"} 500.0' in pages[0]
    assert min(times_s) < LIMIT_S


async def test_nothing_is_left_of_departed_workers(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.stats.of("model-0")
    before, _ = scraped(coordinator, monkeypatch)
    workers = join(coordinator.registry, 10)
    during, _ = scraped(coordinator, monkeypatch)
    assert 'splitserve_decode_kv_usage_ratio{model="model-0"} 0.6' in during
    for worker in workers:
        coordinator.registry.drop(worker.key, "test")
    after, _ = scraped(coordinator, monkeypatch)
    assert values(after) == values(before)
    assert not any(worker.worker_id in during or worker.agent_id in during for worker in workers)


def values(page: str) -> dict[tuple[str, str], float]:
    """All samples but those of this process itself."""
    return {
        (sample.name, str(sample.labels)): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.startswith("splitserve_event_loop")
    }
