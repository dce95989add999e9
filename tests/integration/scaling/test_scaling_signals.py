"""What the coordinator tells an autoscaler, with real processes: figures as clients saw them, plans, standbys."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from autoscaler.signals.observer import Observer
from autoscaler.snapshot import ReplicaState, Snapshot
from splitserve.client import AsyncClient
from splitserve.client.scaling_client import ScalingClient
from splitserve.client.types import Completion
from splitserve.v1 import inference_pb2, scaling_pb2
from tests.support.clients.patient import PatientClient, PatientScalingClient
from tests.support.clients.traffic import REPEATS
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import until as until_info
from tests.support.waiting import PATIENCE_S

COLD = 3
STANDBY, READY = scaling_pb2.WORKER_STATE_STANDBY, scaling_pb2.WORKER_STATE_READY
OPTIONS = ("--simulated-prefill-token-s", "3e-4")
"""100 prompt tokens take 30 ms, and a step 2 ms."""

numbers = itertools.count()


async def ask(client: AsyncClient, max_tokens: int = 8) -> Completion:
    """A request of 100 prompt tokens that no cache knows."""
    number = next(numbers)
    prompt = [number % 250, number // 250, *[7] * 98]
    return await client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def until(probe: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not probe():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_state(
    scaling: ScalingClient, name: str, state: scaling_pb2.WorkerState.ValueType
) -> scaling_pb2.WorkerSignals:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for worker in (await scaling.signals()).models[0].workers:
                if worker.worker_id == name and worker.state == state:
                    return worker
            await asyncio.sleep(0.02)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


@asynccontextmanager
async def steady_load(client: AsyncClient, clients: int = 3) -> AsyncIterator[list[tuple[float, Completion]]]:
    """So many clients, one request after another; (when it began, answer) of each so far."""
    answers: list[tuple[float, Completion]] = []

    async def one() -> None:
        while True:
            began_s = time.monotonic()
            answers.append((began_s, await ask(client)))

    tasks = [asyncio.create_task(one()) for _ in range(clients)]
    try:
        yield answers
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


async def test_signals_agree_with_what_clients_saw(log_dir: Path) -> None:
    options = ["--metrics-port", "0"]
    cluster = Cluster(log_dir, worker_options=OPTIONS, coordinator_options=options)
    async with (
        running(cluster),
        PatientClient(cluster.target) as client,
        PatientScalingClient(cluster.target) as scaling,
    ):
        observer = Observer([scaling])
        assert (await observer.observe()).prefill.ttft is None
        first = [await ask(client) for _ in range(COLD)]
        answers = [await ask(client) for _ in range(10)]
        answers += await asyncio.gather(*(ask(client, 30) for _ in range(10)))
        await cluster.assert_no_leaks()  # both workers are idle, and have reported so
        signals = await scaling.signals()
        (model,) = signals.models
        total = len(first) + len(answers)
        assert (model.arrivals.requests, model.arrivals.prompt_tokens) == (total, 100 * total)
        phases = {phase.phase: phase for phase in model.phases}
        for phase in (scaling_pb2.PHASE_TTFT, scaling_pb2.PHASE_TPOT, scaling_pb2.PHASE_PREFILL):
            assert (sum(phases[phase].counts), phases[phase].cold_samples) == (len(answers), COLD)
        told_s = sum(answer.timings.ttft_ms for answer in answers) / 1e3
        assert phases[scaling_pb2.PHASE_TTFT].sum_seconds == pytest.approx(told_s, rel=1e-3)
        told_s = sum(answer.timings.tpot_ms for answer in answers) / 1e3
        assert phases[scaling_pb2.PHASE_TPOT].sum_seconds == pytest.approx(told_s, rel=1e-3)
        told_s = sum(answer.timings.transfer_ms for answer in answers) / 1e3
        assert phases[scaling_pb2.PHASE_TRANSFER].sum_seconds == pytest.approx(told_s, rel=1e-3)
        ended = {entry.outcome: entry.count for entry in model.outcomes}
        assert ended == dict.fromkeys(ended, 0) | {scaling_pb2.OUTCOME_COMPLETED: total}
        check_snapshot(await observer.observe(), total, answers)
        check_scrape(cluster, total)
        await cluster.assert_no_leaks()


async def test_equal_prompts_are_demand_where_no_worker_keeps_prefixes(log_dir: Path) -> None:
    cluster = Cluster(log_dir, worker_options=[*OPTIONS, "--no-prefix-cache"])
    async with (
        running(cluster),
        PatientClient(cluster.target) as client,
        PatientScalingClient(cluster.target) as scaling,
    ):
        for _ in range(3):
            answer = await client.generate([7] * 100, max_tokens=2, temperature=0.0, ignore_eos=True)
            assert answer.usage.cached_prompt_tokens == 0
        (model,) = (await scaling.signals()).models
        assert model.arrivals.uncached_tokens == model.arrivals.prompt_tokens == 300
        await cluster.assert_no_leaks()


def check_snapshot(seen: Snapshot, total: int, answers: list[Completion]) -> None:
    ttft_s = sorted(answer.timings.ttft_ms / 1e3 for answer in answers)
    slowest_prompt_s = max(answer.timings.prefill_ms for answer in answers) / 1e3
    slowest_step_s = max(answer.timings.tpot_ms for answer in answers) / 1e3
    assert seen.complete
    assert sum(bucket.requests for bucket in seen.arrivals) == total
    assert seen.prefill.ttft is not None
    for percent in (
        25,
        75,
    ):  # between them lies the gap of those that came one by one and those that came at once
        rank = math.ceil(len(ttft_s) * percent / 100)
        assert seen.prefill.ttft.percentile(percent) == pytest.approx(ttft_s[rank - 1], rel=0.2)
    assert [replica.state for replica in seen.prefill.replicas] == [ReplicaState.READY]
    assert (seen.prefill.waiting_requests, seen.prefill.backlog_tokens) == (0, 0)
    assert seen.prefill.tokens_per_s is not None
    least_per_s = min(500, 50 / slowest_prompt_s)
    assert least_per_s < seen.prefill.tokens_per_s < 3_500, (
        "100 tokens take 32 ms, and more on a slow machine"
    )
    assert seen.decode.step is not None
    most_s = max(10e-3, 2 * slowest_step_s)
    assert 1e-3 < seen.decode.step.decode_step_s(1, 100) < most_s, "2.05 ms, and more on a slow machine"
    assert seen.decode.kv_capacity_tokens
    assert seen.decode.max_running_requests == 64
    assert seen.link.kv_bytes_per_token == 16
    assert seen.link.gb_per_s


def check_scrape(cluster: Cluster, total: int) -> None:
    logged = cluster.members["coordinator"].events()
    ends = [e["event"] for e in logged if e["event"] in {"request.completed", "request.cancelled"}]
    assert ends == ["request.completed"] * total, "also of clients that hang up as soon as they have it all"
    (ready,) = [e for e in logged if e["event"] == "metrics.ready"]
    lines = scrape(ready["port"]).splitlines()
    label = 'model="simulated"'
    for line in (
        'splitserve_replicas{role="prefill",state="ready"} 1.0',
        f'splitserve_requests_ended_total{{{label},outcome="completed"}} {float(total)}',
        f"splitserve_arrived_requests_total{{{label}}} {float(total)}",
        f'splitserve_arrived_tokens_total{{kind="prompt",{label}}} {100.0 * total}',
        f'splitserve_time_to_first_token_seconds_count{{cold="false",{label},prompt="short"}} {float(total - COLD)}',
        f'splitserve_time_to_first_token_seconds_count{{cold="false",{label},prompt="long"}} 0.0',
        f'splitserve_time_per_output_token_seconds_count{{cold="true",{label}}} {float(COLD)}',
        f'splitserve_request_phase_seconds_count{{cold="false",{label},phase="transfer"}} {float(total - COLD)}',
    ):
        assert line in lines or relabelled(line, lines), line
    assert not any("prefill-0" in line or "decode-0" in line for line in lines)


def relabelled(line: str, lines: list[str]) -> bool:
    """Whether the line is there with its labels in another order."""

    def parts(text: str) -> tuple[object, ...]:
        name, _, rest = text.partition("{")
        labels, _, value = rest.partition("}")
        return name, frozenset(labels.split(",")), value

    return any(parts(line) == parts(other) for other in lines if "{" in other)


@pytest.mark.alone
async def test_a_standby_joins_without_a_spike_and_leaves_nothing_behind(log_dir: Path) -> None:
    cluster = Cluster(log_dir, worker_options=OPTIONS)
    async with (
        running(cluster),
        PatientClient(cluster.target) as client,
        PatientScalingClient(cluster.target) as scaling,
    ):
        for repeat in range(REPEATS):
            if repeat:
                await ended(cluster, scaling, NEW)
            before, joining, active = await joined(cluster, client, scaling)
            if joining < 3 * before + 0.05 and active < 3 * before + 0.05:
                break
        assert joining < 3 * before + 0.05, "lanes are measured beside the traffic"
        assert active < 3 * before + 0.05, "no request pays for a connection"
        await check_leaving(cluster, scaling)
        await cluster.assert_no_leaks()


NEW = ("prefill-9", "decode-9")


async def joined(cluster: Cluster, client: AsyncClient, scaling: ScalingClient) -> tuple[float, float, float]:
    """TTFT, see `worst`, under load before new workers start, while they do, and once they serve."""
    async with steady_load(client) as answers:
        await until(lambda: len(answers) > 40)
        joining_s = time.monotonic()
        for name in NEW:
            cluster.add_worker(name.partition("-")[0], name, "--standby")
        for name in NEW:
            await until_state(scaling, name, STANDBY)
        await until_info(cluster, connected, "connected beforehand")
        waited = len(answers)
        await until(lambda: len(answers) > waited + 30)
        assert {who(answer) for _, answer in answers} == {("prefill-0", "decode-0")}
        active_s = time.monotonic()
        await scaling.apply_plan(active=NEW)
        await until(lambda: set(NEW) <= {n for _, a in answers for n in who(a)})
        after = len(answers)
        await until(lambda: len(answers) > after + 40)
    return (
        worst([a for began, a in answers if began < joining_s]),
        worst([a for began, a in answers if joining_s <= began < active_s]),
        worst([a for began, a in answers if active_s <= began]),
    )


async def ended(cluster: Cluster, scaling: ScalingClient, names: Sequence[str]) -> None:
    """Ends workers, and waits until the coordinator has forgotten them."""
    await scaling.apply_plan(standby=names)
    for name in names:
        await until_state(scaling, name, STANDBY)
        cluster.members.pop(name).terminate()
    async with asyncio.timeout(PATIENCE_S):
        while {w.worker_id for w in (await scaling.signals()).models[0].workers} & set(names):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await scaling.apply_plan()


def connected(info: inference_pb2.GetServerInfoResponse) -> bool:
    lanes = {worker.worker_id: [lane.peer for lane in worker.lanes] for worker in info.workers}
    return lanes["prefill-9"] == lanes["prefill-0"] == ["decode-0", "decode-9"]


def who(answer: Completion) -> tuple[str, str]:
    return answer.served_by.prefill_worker, answer.served_by.decode_worker


def worst(answers: list[Completion]) -> float:
    """95th percentile of TTFT, seconds."""
    return sorted(answer.timings.ttft_ms for answer in answers)[len(answers) * 95 // 100] / 1e3


async def check_leaving(cluster: Cluster, scaling: ScalingClient) -> None:
    observer = Observer([scaling])
    assert {replica.name for replica in (await observer.observe()).prefill.replicas} == {
        "prefill-0",
        "prefill-9",
    }
    answer = await scaling.apply_plan(standby=["prefill-9", "gone"], active=["decode-9"])
    assert list(answer.unknown_worker_ids) == ["gone"]
    await until_state(scaling, "prefill-9", STANDBY)
    cluster.members.pop("prefill-9").terminate()
    async with asyncio.timeout(PATIENCE_S):
        while len((await observer.observe()).prefill.replicas) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    names = {worker.worker_id for worker in (await scaling.signals()).models[0].workers}
    assert names == {"prefill-0", "decode-0", "decode-9"}
