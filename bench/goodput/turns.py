"""One turn: a system is started, asked by the generator and ended. Runs are kept in a file, so that they add up."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.asking import random_prompt
from bench.goodput.generator import LoadJob, LoadResult, requests_from, result_from_json
from bench.goodput.mixes import PlannedRequest, planned
from bench.goodput.outcome import SentRequest
from bench.goodput.statistics import percentile
from bench.goodput.systems import ServingOptions, served
from bench.machine import OtherLoad, StolenTime, core_speed_mb_per_s
from splitserve.runtime.cancellation import end_tasks

GRACE_S = 60.0
"""Time for the generator to start and to report, beyond what its job can last."""
MOST_STOLEN = 0.05
"""A turn in which the machine's host took more of the cores within ten seconds is run again: a step waits for its
slowest thread, so that both systems nearly stand still for as long."""
MOST_AGAIN = 2
WARM_UP_TOKENS = (32, 32, 96, 128, 256, 512, 768, 1024, 96, 96)
WARM_UP_OUTPUT_TOKENS = 24
WARM_UP_SEED = -1


@dataclass(frozen=True)
class TurnKey:
    """What one run measures: a system under one load."""

    mix: str
    rate: float
    seed: int
    requests: int
    system: str
    conditions: str
    """Model and targets, which differ between calls, not within one."""


@dataclass(frozen=True)
class FinishedTurn:
    """`lateness_p99_s`: of the generator's sending; `other_load`: share of all cores that other processes used;
    `generator_cores`: that the generator used; `core_speed`: MB/s before and after, with the system idle; `stolen`: the
    largest share of all cores that the machine's host took within ten seconds."""

    key: TurnKey
    requests: tuple[SentRequest, ...]
    lateness_p99_s: float
    other_load: float
    generator_cores: float
    core_speed: tuple[float, float]
    stolen: float = 0.0


def turn_order(
    loads: Sequence[tuple[str, float]],
    seeds: range,
    requests: int,
    systems: Sequence[str],
    conditions: str,
) -> list[TurnKey]:
    """All runs: for every load (mix and rate) the systems in a row, forward for even seeds and backward for odd ones
    (A B B A)."""
    return [
        TurnKey(mix, rate, seed, requests, system, conditions)
        for seed in seeds
        for mix, rate in loads
        for system in (systems if seed % 2 == 0 else reversed(systems))
    ]


async def finished_turns(
    keys: Sequence[TurnKey], options: ServingOptions, timeout_s: float, kept: Path | None
) -> AsyncIterator[FinishedTurn]:
    """Runs them in this order; those that the file `kept` holds are not run again, new ones are added to it. Of turns
    that were disturbed (`MOST_STOLEN`) and run again the least disturbed one counts."""
    known = {turn.key: turn for turn in kept_turns(kept)} if kept is not None else {}
    for key in keys:
        turn = known.get(key)
        if turn is None:
            turn = await run_turn(key, options, timeout_s)
            for _ in range(MOST_AGAIN):
                if turn.stolen <= MOST_STOLEN:
                    break
                again = await run_turn(key, options, timeout_s)
                turn = min(turn, again, key=lambda run: run.stolen)
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(asdict(turn)) + "\n")
        yield turn


async def run_turn(key: TurnKey, options: ServingOptions, timeout_s: float) -> FinishedTurn:
    """Runs a turn. Raises RuntimeError if the system does not start or the generator fails."""
    plan = planned(key.mix, key.rate, key.requests, key.seed, options.vocabulary)
    before = core_speed_mb_per_s()
    load = OtherLoad()
    async with served(key.system, options) as at:
        load.mark()
        targets_ms = (options.slo.ttft_s * 1e3, options.slo.tpot_s * 1e3)
        job = LoadJob(at, warm_up(options.vocabulary), plan, timeout_s, targets_ms)
        async with watched_host() as stolen:
            result = await generate(job)
        cores = result.cpu_s / result.wall_s
        # The generator has ended, so its CPU time is not among that of this process's children.
        other = load.share() - cores / (os.cpu_count() or 1)
    return FinishedTurn(
        key,
        result.requests,
        round(percentile(result.lateness_s, 0.99) or 0.0, 4),
        round(max(0.0, other), 3),
        round(cores, 3),
        (before, core_speed_mb_per_s()),
        round(stolen.peak, 3),
    )


@asynccontextmanager
async def watched_host() -> AsyncIterator[StolenTime]:
    """Looks once a second at what the machine's host takes."""
    stolen = StolenTime()

    async def watch() -> None:
        while True:
            stolen.look(time.monotonic(), psutil.cpu_times().steal)
            await asyncio.sleep(1.0)

    watching = asyncio.create_task(watch())  # a TaskGroup would wrap what the block raises
    try:
        yield stolen
    finally:
        await end_tasks([watching])


def warm_up(vocabulary: int) -> list[PlannedRequest]:
    """Requests of many lengths: they connect everything, and systems that measure their own steps have done so."""
    chance = random.Random(WARM_UP_SEED)
    return [
        PlannedRequest(
            0.0, tuple(random_prompt(chance, tokens, vocabulary)), WARM_UP_OUTPUT_TOKENS, "warm-up"
        )
        for tokens in WARM_UP_TOKENS
    ]


async def generate(job: LoadJob, grace_s: float = GRACE_S) -> LoadResult:
    """Runs the generator process. Raises RuntimeError if it fails, or does not end by its job's deadline."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "bench.goodput.generator")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(job.longest_s + grace_s):
            out, err = await process.communicate(json.dumps(asdict(job)).encode())
    except TimeoutError:
        raise RuntimeError("the generator did not end by its deadline") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"the generator failed: {err.decode(errors='replace')[-2000:]}")
    return result_from_json(out.decode())


def kept_turns(file: Path) -> list[FinishedTurn]:
    """The runs in a file that `finished_turns` wrote; none if it does not exist."""
    if not file.exists():
        return []
    return [_turn_from(json.loads(line)) for line in file.read_text().splitlines()]


def _turn_from(fields: dict[str, Any]) -> FinishedTurn:
    changed = {
        "key": TurnKey(**fields["key"]),
        "requests": requests_from(fields["requests"]),
        "core_speed": tuple(fields["core_speed"]),
    }
    return FinishedTurn(**{**fields, **changed})
