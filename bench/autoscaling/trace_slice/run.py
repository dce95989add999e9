"""The default policy on real processes, beside its forecast: `python -m bench.autoscaling.trace_slice --trace FILE`.

`splitserve up --autoscale` with real weights follows a slice of a trace. Each worker has `--core-share` of a core
(`bench.core_shares`, which needs root), so that a replica is worth the same however many there are. First the trace's
beginning is replayed on one replica of each pool and an `EngineModel` is fitted to it, and a start is timed. The next
`--minutes` are scaled to `--peak-replicas`, go through the simulator with the same policy, and are then replayed.

Requests' targets are those of the policy. Lengths are multiplied by `--prompt-share` and `--output-share`. Workers
compute for their own pool alone (`--local-prefill never`), as the simulator's do.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from autoscaler.policies.policy_file import parse_policy
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.scenario import Scenario, Slo, StartTimes
from autoscaler.simulation.simulator import run_policy
from autoscaler.simulation.traces.scaling import scaled_to_peak
from autoscaler.simulation.traces.trace import Trace, TraceRequest, load_trace
from bench.asking import AskedAnswer
from bench.autoscaling.engine_fit import EVALUATIONS, fitted
from bench.autoscaling.trace_slice.scaled_cluster import scaled_cluster
from bench.core_shares import core_shares
from bench.machine import show_content, this_machine
from bench.option_values import positive_number, positive_whole
from splitserve.config.coordinator import AdmissionConfig
from splitserve.errors import SplitserveError
from splitserve.roles import PoolName

KNOWN = EngineModel(max_step_tokens=512, kv_bytes_per_token=23_040)
"""Fixed by the workers' settings and the model."""
SEED = 0
BURSTS = (4, 12)
"""Streams that decode together in the part to fit: requests there come too thinly to show what a batch costs."""
BURST_PROMPT, BURST_OUTPUT, BURST_S = 8, 64, 20.0
POINTS = 0.03
"""The bar: attained and forecast are no further apart."""


def rules_of(
    options: argparse.Namespace, prefill: int, decode: int, *, fixed: bool = False
) -> dict[str, Any]:
    """A policy with at least so many replicas; `fixed`: never more. Apart from bounds and targets, the default."""
    pools: dict[str, Any] = {}
    for pool, least, most, target_ms in (
        ("prefill", prefill, options.max_prefill, options.ttft_ms),
        ("decode", decode, options.max_decode, options.tpot_ms),
    ):
        pools[pool] = {
            "min_replicas": least,
            "max_replicas": least if fixed else most,
            "target_ms": target_ms,
        }
        pools[pool] |= {"gpus_per_replica": 0, "cold_start_s": options.cold_start_s}
    return pools


def parts_of(options: argparse.Namespace) -> tuple[Trace, Trace]:
    """The trace's beginning, to fit, stretched to `--fit-rate`; and the minutes after it."""
    whole = load_trace(options.trace, SEED)

    def cut(requests: Sequence[TraceRequest], stretch: float) -> list[TraceRequest]:
        return [
            TraceRequest(
                (request.arrival_s - requests[0].arrival_s) * stretch,
                max(2, round(request.prompt_tokens * options.prompt_share)),
                max(2, round(request.output_tokens * options.output_share)),
            )
            for request in requests
        ]

    first, rest = whole.requests[: options.fit_requests], whole.requests[options.fit_requests :]
    last_s = rest[0].arrival_s + options.minutes * 60
    rate = len(first) / max(first[-1].arrival_s - first[0].arrival_s, 1e-9)
    return (
        Trace("to fit", with_bursts(cut(first, rate / options.fit_rate))),
        Trace(whole.name, cut([request for request in rest if request.arrival_s < last_s], 1.0)),
    )


def with_bursts(requests: list[TraceRequest]) -> list[TraceRequest]:
    """The requests, and after them bursts of short prompts."""
    end_s = requests[-1].arrival_s
    return requests + [
        TraceRequest(end_s + number * BURST_S, BURST_PROMPT, BURST_OUTPUT)
        for number, streams in enumerate(BURSTS, 1)
        for _ in range(streams)
    ]


def met(answer: AskedAnswer | SplitserveError, slo: Slo) -> tuple[bool, bool]:
    """Whether TTFT and TPOT were within their targets."""
    if isinstance(answer, SplitserveError):
        return False, False
    return answer.token_s[0] <= slo.ttft_s, answer.tpot_s <= slo.tpot_s


async def run(options: argparse.Namespace, tell: Console) -> dict[str, Any]:
    """Fits, times a start, forecasts, replays."""
    slo = Slo(options.ttft_ms / 1e3, options.tpot_ms / 1e3)
    to_fit, rest = parts_of(options)
    with core_shares(options.core_share) as shares:
        rules = rules_of(options, 1, 1, fixed=True)
        async with scaled_cluster(options.model, KNOWN.max_step_tokens, rules, shares) as up:
            await up.replay(Trace("to warm up", [TraceRequest(0.0, 16, 4)]))
            tell.print(f"to fit: {len(to_fit.requests)} requests in {to_fit.duration_s:.0f} s")
            took = [answer for answer in await up.replay(to_fit) if isinstance(answer, AskedAnswer)]
            latencies = [answer.token_s[0] for answer in took], [answer.tpot_s for answer in took]
            engine = await asyncio.to_thread(fitted, to_fit, latencies, KNOWN, options.evaluations)
            tell.print(engine)
            up.follow(rules_of(options, 2, 1, fixed=True))
            began_s = time.monotonic()
            await up.until(lambda now: now["prefill"] == 2)
            options.cold_start_s = round(time.monotonic() - began_s, 1)
            trace = scaled_to_peak(rest, options.peak_replicas, engine, slo.tpot_s, SEED)
            rules = rules_of(options, 1, 1)
            forecast = await asyncio.to_thread(forecast_of, trace, engine, slo, rules, options.cold_start_s)
            tell.print(
                f"start: {options.cold_start_s} s; forecast: {forecast.attainment:.4f}; {len(trace.requests)} requests"
            )
            up.follow(rules)
            watching = asyncio.create_task(up.watch())
            answers = await up.replay(trace)
            watching.cancel()
    return outcome_of(answers, slo, up.most, engine, trace, forecast, options)


def forecast_of(
    trace: Trace, engine: EngineModel, slo: Slo, rules: dict[str, Any], cold_start_s: float
) -> Outcome:
    """What the simulator says, from the replicas that serve when the slice begins."""
    initial: Mapping[PoolName, int] = {"prefill": 2, "decode": 1}
    scenario = Scenario(
        trace,
        engine,
        slo,
        StartTimes(cold_start_s),
        initial,
        prefix_cache=False,
        admission=AdmissionConfig(),
    )
    return run_policy(scenario, parse_policy(rules))


def outcome_of(
    answers: Sequence[AskedAnswer | SplitserveError],
    slo: Slo,
    most: Counter[str],
    engine: EngineModel,
    trace: Trace,
    forecast: Outcome,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The real run and the forecast, side by side, and whether the bar holds."""
    marks = [met(answer, slo) for answer in answers]
    attained = sum(all(mark) for mark in marks) / len(marks)
    failed = Counter(answer.reason for answer in answers if isinstance(answer, SplitserveError))
    ttft_s = [answer.token_s[0] for answer in answers if isinstance(answer, AskedAnswer)]
    real = {
        "of": "real processes",
        "attained": round(attained, 4),
        "ttft": round(sum(mark[0] for mark in marks) / len(marks), 4),
        "tpot": round(sum(mark[1] for mark in marks) / len(marks), 4),
        **percentiles(ttft_s),
        "failed": sum(failed.values()),
        "most_prefill": most["prefill"],
        "most_decode": most["decode"],
    }
    predicted = {
        "of": "forecast",
        "attained": round(forecast.attainment, 4),
        "ttft": round(forecast.attainment_ttft, 4),
        "tpot": round(forecast.attainment_tpot, 4),
        **percentiles([request.ttft_s for request in forecast.requests if request.ttft_s is not None]),
        "failed": forecast.failed_requests,
        "most_prefill": max(sum(moment.replicas["prefill"].values()) for moment in forecast.moments),
        "most_decode": max(sum(moment.replicas["decode"].values()) for moment in forecast.moments),
    }
    within = most["prefill"] <= options.max_prefill and most["decode"] <= options.max_decode
    holds = abs(attained - forecast.attainment) <= POINTS and not failed and within
    return {
        "rows": [real, predicted],
        "requests": len(trace.requests),
        "duration_s": round(trace.duration_s, 1),
        "cold_start_s": options.cold_start_s,
        "errors": dict(failed),
        "engine": dataclasses.asdict(engine),
        "holds": holds,
    }


def percentiles(ttft_s: Sequence[float]) -> dict[str, float]:
    """Percentiles of the time to the first token, in seconds."""
    return {f"ttft_p{share}_s": round(float(np.percentile(ttft_s, share)), 3) for share in (50, 95)}


def main() -> int:
    """0 if the bar holds. Progress goes to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.autoscaling.trace_slice", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--minutes", type=positive_number, default=20.0)
    parser.add_argument(
        "--peak-replicas", type=positive_number, default=2.5, help="of both pools, in the busiest minute"
    )
    parser.add_argument("--core-share", type=positive_number, default=0.25, help="of each worker")
    parser.add_argument("--prompt-share", type=positive_number, default=0.125)
    parser.add_argument("--output-share", type=positive_number, default=0.125)
    parser.add_argument("--max-prefill", type=positive_whole, default=3)
    parser.add_argument("--max-decode", type=positive_whole, default=2)
    parser.add_argument("--ttft-ms", type=positive_number, default=4000.0)
    parser.add_argument("--tpot-ms", type=positive_number, default=250.0)
    parser.add_argument(
        "--cold-start", dest="cold_start_s", type=positive_number, default=60.0, help="until one was timed"
    )
    parser.add_argument("--fit-requests", type=positive_whole, default=120)
    parser.add_argument("--fit-rate", type=positive_number, default=0.8, help="requests a second")
    parser.add_argument(
        "--evaluations", type=positive_whole, default=EVALUATIONS, help="limit per round of the fit"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    machine, tell = this_machine(), Console(stderr=True)
    try:
        content = asyncio.run(run(options, tell))
    except SplitserveError as error:
        tell.print(f"error: {error.message}")
        return 1
    show_content("trace_slice", "bench.autoscaling.trace_slice", machine, content, as_json=options.json)
    return 0 if content["holds"] else 1
