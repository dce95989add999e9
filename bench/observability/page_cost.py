"""Cost of the page at `/`: `python -m bench.observability.page_cost [--json]`.

Scripted workers (200 by default) and a paced load of requests (100 a second); the coordinator on a core of its own
where there are two. Windows with the page open in a real Chromium and without it take turns. A window's figure is the
coordinator's own CPU time, all its threads, by the time that passed: a share of one core. What the page costs is the
median of the differences between neighbours. `load_ms`: from the navigation's start until the page shows workers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import statistics
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil

from bench.front_door.processes import answers, coordinator, scripted_workers, split_cores
from bench.machine import report, this_machine
from bench.option_values import positive_number, positive_whole
from launcher.cluster.placement import available_cores
from splitserve.client import AsyncClient
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser

MODEL, VOCABULARY = "simulated", 257
STEP_MS = 15.0
MAX_TOKENS = 4
SETTLE_S = 3.0
"""From a page's opening or closing to the start of its window."""
SHOWN = """
new MutationObserver((_, observer) => {
  if (document.querySelectorAll(".worker").length < %d) return;
  window.shownMs = performance.now();
  observer.disconnect();
}).observe(document, { childList: true, subtree: true });
"""
"""Notes when the page shows so many workers, in the page itself: what drives the browser is slower."""


@asynccontextmanager
async def paced_load(target: str, per_s: float) -> AsyncIterator[list[int]]:
    """Sends requests at this pace while the context is open; yields how many have been answered, as one number."""
    answered = [0]

    async def answered_once(client: AsyncClient, number: int) -> None:
        await client.generate([number % 250, 7, 8, 9], max_tokens=MAX_TOKENS)
        answered[0] += 1

    async def send() -> None:
        due_s = time.monotonic()
        async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
            for number in range(10**9):
                due_s += 1 / per_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                group.create_task(answered_once(client, number))

    sending = asyncio.create_task(send())
    try:
        yield answered
    finally:
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending


async def window(pid: int, seconds: float) -> float:
    """CPU time of the process in a window by the time that passed."""
    process = psutil.Process(pid)
    began_s, before = time.monotonic(), process.cpu_times()
    await asyncio.sleep(seconds)
    after, took_s = process.cpu_times(), time.monotonic() - began_s
    return (after.user + after.system - before.user - before.system) / took_s


@asynccontextmanager
async def opened_page(browser: Browser, url: str, workers: int) -> AsyncIterator[float]:
    """The page in a new tab with an empty cache; yields the milliseconds until it showed all workers."""
    context = await browser.new_context(base_url=url)
    try:
        page = await context.new_page()
        await page.add_init_script(SHOWN % workers)
        await page.goto("/", wait_until="commit")
        yield float(await (await page.wait_for_function("() => window.shownMs")).json_value())
    finally:
        await context.close()


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All windows."""
    from playwright.async_api import async_playwright

    available = available_cores()
    cores, pairs = split_cores(available), args.workers // 2
    os.sched_setaffinity(0, cores.rest)  # the load, and what is started from here
    shares: dict[str, list[float]] = {"closed": [], "open": []}
    load_ms: list[float] = []
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(coordinator(CoordinatorConfig(), cores.front))
        await answers(front.grpc)
        workers = scripted_workers([front.grpc], STEP_MS, MODEL, VOCABULARY, cores.rest, pairs)
        await stack.enter_async_context(workers)
        answered = await stack.enter_async_context(paced_load(front.grpc, args.requests_per_s))
        # The browser is somebody's own machine: it may use every core.
        os.sched_setaffinity(0, available)
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(executable_path=_chromium())
        stack.push_async_callback(browser.close)
        os.sched_setaffinity(0, cores.rest)
        await asyncio.sleep(SETTLE_S)
        began_s, before = time.monotonic(), answered[0]
        for _ in range(args.rounds):
            await asyncio.sleep(SETTLE_S)
            shares["closed"].append(await window(front.pid, args.seconds))
            async with opened_page(browser, f"http://{front.http}", 2 * pairs) as shown_ms:
                load_ms.append(shown_ms)
                await asyncio.sleep(SETTLE_S)
                shares["open"].append(await window(front.pid, args.seconds))
        per_s = (answered[0] - before) / (time.monotonic() - began_s)
    added = [after - before for before, after in zip(shares["closed"], shares["open"], strict=True)]
    return {
        "workers": 2 * pairs,
        "requests_per_s": per_s,
        "share_closed": statistics.median(shares["closed"]),
        "share_open": statistics.median(shares["open"]),
        "share_added": statistics.median(added),
        "load_ms": statistics.median(load_ms),
        "details": {"shares": shares, "load_ms": load_ms},
    }


def _chromium() -> str:
    path = shutil.which("chromium")
    if path is None:
        message = "there is no Chromium here (Debian: apt-get install chromium)"
        raise UnavailableError(message, reason="NO_CHROMIUM")
    return path


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--workers", type=positive_whole, default=200, help="of both pools together")
    parser.add_argument("--requests-per-s", type=positive_number, default=100.0)
    parser.add_argument("--rounds", type=positive_whole, default=5, help="windows of each kind")
    parser.add_argument("--seconds", type=positive_number, default=10.0, help="length of a window")
    args = parser.parse_args()
    machine = this_machine()
    figures = asyncio.run(measure(args))
    if args.json:
        command = shlex.join(["python", "-m", "bench.observability.page_cost", *sys.argv[1:]])
        print(json.dumps(report("page_cost", command, machine, **figures)))
        return
    for name, value in figures.items():
        if name != "details":
            print(f"{name:16} {value:.4g}")


if __name__ == "__main__":
    main()
