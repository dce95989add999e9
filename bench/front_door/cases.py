"""The measurements of `bench.front_door`, each with its processes."""

from __future__ import annotations

import asyncio
import http.client
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from bench.front_door.dynamo import dynamo
from bench.front_door.processes import (
    Cores,
    Process,
    answers,
    coordinator,
    front_and_workers,
    generate_load,
    real_workers,
)
from bench.front_door.profile import profiled
from splitserve.config.coordinator import CoordinatorConfig

STREAMS = 64
ANSWER_TOKENS = 64
ENDLESS_TOKENS = 8000
FEW_TOKENS = 2
LAG_STREAMS = 500
OPEN_STREAMS = 10_000
IDLE_STEP_MS = 600_000.0
FRONTS = (1, 2, 4)
LAG_METRIC = "splitserve_event_loop_lag_seconds"

Result = dict[str, Any]


@dataclass(frozen=True)
class LoadPlan:
    """Parameters of the measurements. Times in seconds, or as named."""

    cores: Cores
    seconds: float
    paced_step_ms: float
    fast_step_ms: float
    lag_step_ms: float
    tokenizer: str
    vocabulary: int
    coalesce_ms: float
    profiles: bool

    @property
    def config(self) -> CoordinatorConfig:
        """Settings of a coordinator that admits everything."""
        return CoordinatorConfig(
            max_running_requests=20_000, max_coalesce_ms=self.coalesce_ms, local_prefill="never"
        )

    @property
    def model(self) -> tuple[str, int]:
        """Name and vocabulary size of the scripted model."""
        return self.tokenizer, self.vocabulary

    async def load(self, front: Process, entrypoint: str, max_tokens: int, **changed: Any) -> Result:
        """One window against a process."""
        target = front.http if entrypoint == "sse" else front.grpc
        options = {
            "entrypoint": entrypoint,
            "target": target,
            "pid": front.pid,
            "max_tokens": max_tokens,
            "streams": STREAMS,
            "seconds": self.seconds,
            "model": self.tokenizer,
        }
        return await generate_load(self.cores.rest, **options | changed)

    async def costs(self, front: Process, entrypoint: str, **changed: Any) -> Result:
        """Windows of tokens alone, of answers with their requests, and of requests with few tokens; the CPU time of a
        token and of a request."""
        sizes = {"endless": ENDLESS_TOKENS, "answers": ANSWER_TOKENS, "few": FEW_TOKENS}
        windows = {name: await self.load(front, entrypoint, size, **changed) for name, size in sizes.items()}
        token_us, few = windows["endless"]["cpu_us_per_token_all"], windows["few"]
        request_us = 1e6 * few["cpu_s"] / max(1, few["requests"]) - FEW_TOKENS * token_us
        costs = {"cpu_us_per_token": token_us, "cpu_us_per_request": request_us, "windows": windows}
        if self.profiles:
            pid = changed.get("pid", front.pid)
            costs["profiles"] = {
                name: await profiled(pid, self.load(front, entrypoint, sizes[name], **changed))
                for name in ("endless", "few")
            }
        return costs


async def token_costs(plan: LoadPlan, entrypoints: list[str]) -> Result:
    """CPU time of tokens and requests, paced like a real decode and unpaced; token ages at both ends."""
    costs: Result = {}
    paced, fast = plan.paced_step_ms, plan.fast_step_ms
    for pace, step_ms in (("paced", paced), ("saturated", fast)):
        async with front_and_workers(plan.config, step_ms, plan.model, plan.cores) as (fronts, workers):
            for entrypoint in entrypoints:
                costs[f"{entrypoint}_{pace}"] = await plan.costs(fronts[0], entrypoint)
            if pace == "paced":
                direct = Process(fronts[0].pid, workers.grpc)
                costs["direct_paced"] = await plan.load(direct, "direct", ANSWER_TOKENS)
    return costs


async def worker_costs(plan: LoadPlan) -> Result:
    """CPU time of a real decode worker with the simulated engine, its steps paced."""
    async with coordinator(plan.config, plan.cores.rest) as front:
        await answers(front.grpc)
        async with real_workers([front.grpc], plan.paced_step_ms, STREAMS, plan.cores) as decode:
            return {"worker_paced": await plan.costs(front, "grpc", pid=decode.pid, model="simulated")}


async def loop_lag(plan: LoadPlan) -> Result:
    """Event-loop lag of the coordinator with many streams."""
    async with front_and_workers(plan.config, plan.lag_step_ms, plan.model, plan.cores) as (fronts, _):
        before = await asyncio.to_thread(_lag_buckets, fronts[0].http)
        load = await plan.load(fronts[0], "grpc", ANSWER_TOKENS, streams=LAG_STREAMS)
        after = await asyncio.to_thread(_lag_buckets, fronts[0].http)
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
    return {"p99_ms_at_most": 1e3 * _percentile(counts, 0.99), "window": load}


async def open_streams(plan: LoadPlan) -> Result:
    """Resident memory of the coordinator against the number of idle streams, and what they cost while idle."""
    async with front_and_workers(plan.config, IDLE_STEP_MS, plan.model, plan.cores) as (fronts, _):
        options = {"streams": OPEN_STREAMS, "open": True}
        opened = await plan.load(fronts[0], "grpc", ENDLESS_TOKENS, **options)
    streams, sizes = np.array(opened["rss_bytes"], dtype=float).T
    return opened | {"bytes_per_stream": float(np.polyfit(streams, sizes, 1)[0])}


async def scaling(plan: LoadPlan) -> Result:
    """Throughput of answers of 64 tokens, through one coordinator and through several."""
    by_count: Result = {}
    for count in FRONTS:
        async with front_and_workers(plan.config, plan.fast_step_ms, plan.model, plan.cores, count) as (
            fronts,
            _,
        ):
            windows = await asyncio.gather(
                *(plan.load(front, "sse", ANSWER_TOKENS, streams=STREAMS // count) for front in fronts)
            )
        by_count[str(count)] = {
            "tokens_per_s": sum(window["tokens_per_s"] for window in windows),
            "cpu_share": [window["cpu_share"] for window in windows],
        }
    return by_count


async def beside_dynamo(plan: LoadPlan, model_path: Path, paced_speedup: float) -> Result:
    """The same SSE windows against NVIDIA Dynamo's frontend; its tokens carry no time stamps."""
    costs: Result = {}
    for pace, speedup in (("paced", paced_speedup), ("saturated", 0.0)):
        async with dynamo(model_path, speedup, plan.cores) as front:
            costs[f"dynamo_{pace}"] = await plan.costs(front, "sse", model=str(model_path))
    return costs


def _lag_buckets(http_address: str) -> dict[float, float]:
    connection = http.client.HTTPConnection(http_address, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    for family in text_string_to_metric_families(text):
        if family.name == LAG_METRIC:
            return {float(s.labels["le"]): s.value for s in family.samples if s.name.endswith("_bucket")}
    raise RuntimeError(f"no {LAG_METRIC} at {http_address}")


def _percentile(reached: dict[float, float], share: float) -> float:
    """Upper bound of the bucket with the percentile, from cumulative counts."""
    return next(bound for bound, count in sorted(reached.items()) if count >= share * reached[float("inf")])
