"""How long a KV handoff takes, and what the split costs: `python -m bench.handoff`.

Starts one prefill and one decode worker (real processes, real NIXL, a core each where there are two) behind two
coordinators. One sends each prompt through both workers: split. The other has the decode worker compute it too
(`local_prefill: always`): colocated, the same engine behind the same front door. For every prompt length the two
take turns, and a raw NIXL write of as many bytes follows each turn. No prompt is used twice. The worker that computes
the prompt always sits on the first core, so that cores that differ, or that others keep busy, slow both alike. With
GPUs each has one of them (`--replicas-per-gpu 2`: both the same), and the cores that `splitserve up` gives it.

* exposed_ms: from the end of the last prefill step, first token sampled, until the decode worker has the sequence
  in its running batch. Both workers stamp with CLOCK_MONOTONIC, which is one clock for all processes of a machine,
  so the difference is exact. It contains the write of whatever was not yet written, the completion, the decode
  worker's poll and the admission.
* gb_per_s: bytes of the whole handoff over exposed_ms_p50. Chunks of a long prompt are written while the next one
  is computed, so this can exceed the raw write.
* raw_gb_per_s: the same number of bytes as one write of one descriptor between two idle processes; see
  `bench.handoff.raw_write`.
* descriptors, contiguous_runs: writes posted, after merging neighbours; and the least number there could be. A
  prompt of several chunks may cut a run once a chunk.
* ttft: request sent until the first token has come, at the client. The difference is the median of those between
  neighbours in time. around_compute and compute_difference are its two parts, medians likewise: what the split adds
  around the computation of the prompt, and by how much the two workers differ in that computation itself, which both
  do with the same code on the same core. The latter is chance: from start to start of a worker it differs by a percent.
* other_load: share of the machine that other processes used, the median of the turns. Turns above
  `--max-other-load` are left out, up to twice as many as are wanted.
* second_token_gap: between first and second token, at the client; normal_step: between later ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
from collections.abc import Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from bench.asking import AskedAnswer, ask, random_prompt
from bench.cluster import Fronts, gpus_of, pin, running_cluster
from bench.handoff.raw_write import RawLane, raw_lane
from bench.handoff.rows import Handoff, HandoffRow, Samples, make_row
from bench.machine import OtherLoad, report, this_machine
from bench.option_values import positive_number, positive_whole
from launcher.cluster.child_process import Event
from launcher.cluster.placement import available_cores
from splitserve.client import AsyncClient
from splitserve.config.cluster import ClusterConfig
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.engine import SIMULATED, EngineConfig
from splitserve.errors import DeadlineExceededError

LENGTHS = (16, 64, 128, 256, 512, 1000, 2000, 4000, 8000)
MAX_TOKENS = 12
REPEATS = 15
FEWEST_REPEATS = 3
FULL_REPEATS_UP_TO = 1000
"""Longer prompts are repeated less, so that each length takes about equally long."""
POOL_BYTES = 1 << 30
EVENT_WAIT_S = 5.0
MAX_OTHER_LOAD = 0.05
"""Share of the machine that other processes may use during a valid turn."""
HOPES = 2
"""Disturbed turns skipped per wanted turn; beyond that they count, too."""
WARM_UP_TOKENS = 64
ON_CPU = ("cpu", "cpu")


class HandoffLog:
    """Joins what the two workers log about each handoff."""

    def __init__(self) -> None:
        self._written: dict[str, Event] = {}
        self._admitted: dict[str, Event] = {}
        self._news = asyncio.Event()

    def on_event(self, event: Event) -> None:
        """Handles a log event of any process."""
        books = {"handoff.written": self._written, "handoff.admitted": self._admitted}
        if (book := books.get(event["event"])) is not None:
            # "<request>.<attempt>.<random>", for a prefill worker with "/<number>" behind it.
            book[str(event["request_id"]).split(".")[0]] = event
            self._news.set()

    async def take(self, request_id: str) -> Handoff:
        """The handoff of a request. Raises DeadlineExceededError when the workers log none."""
        try:
            async with asyncio.timeout(EVENT_WAIT_S):
                while request_id not in self._written or request_id not in self._admitted:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise DeadlineExceededError(f"no log of the handoff of {request_id}") from None
        written, admitted = self._written.pop(request_id), self._admitted.pop(request_id)
        return Handoff(
            size=int(written["bytes"]),
            descriptors=int(written["descriptors"]),
            contiguous_runs=int(written["contiguous_runs"]),
            computed_s=float(written["computed_s"]),
            admitted_s=float(admitted["admitted_s"]),
        )


class HandoffBench:
    """Sends requests and collects samples."""

    def __init__(
        self,
        fronts: Fronts,
        log: HandoffLog,
        lane: RawLane,
        vocabulary: int,
        max_other_load: float,
        *,
        on_cpu: bool = True,
    ) -> None:
        self._on_cpu = on_cpu
        self._split, self._colocated = fronts.clients["split"], fronts.clients["colocated"]
        self._pids = fronts.pids["prefill-0"], fronts.pids["decode-0"]
        self._log, self._lane, self._vocabulary = log, lane, vocabulary
        self._random = random.Random(0)
        self._load, self._max_other_load, self._hopes = OtherLoad(), max_other_load, HOPES

    async def measure(self, length: int, repeats: int) -> Samples:
        """`repeats` turns at one prompt length. Turns disturbed by other processes are skipped, within limits."""
        samples, hopes = Samples(length), self._hopes * repeats
        while len(samples.other_load) < repeats:
            self._load.mark()
            turn = await self._turn(length, len(samples.other_load))
            turn.other_load.append(self._load.share())
            if turn.other_load[0] > self._max_other_load and hopes > 0:
                hopes -= 1
                continue
            samples.extend(turn)
        return samples

    async def _turn(self, length: int, number: int) -> Samples:
        """Measures split, colocated and the raw write once; colocated comes first in every second turn."""
        samples = Samples(length)
        for kind in ("split", "colocated") if number % 2 else ("colocated", "split"):
            self._place(*(self._pids if kind == "split" else reversed(self._pids)))
            if kind == "split":
                samples.split.append(await self._ask(self._split, length))
                samples.handoffs.append(await self._log.take(samples.split[-1].request_id))
            else:
                samples.colocated.append(await self._ask(self._colocated, length))
        samples.raw_s.append(await asyncio.to_thread(self._lane.write_s, samples.handoffs[-1].size))
        return samples

    async def warm_up(self) -> None:
        """Warm-up: first contact, steps and writes, not measured."""
        for number in range(FEWEST_REPEATS):
            await self._turn(WARM_UP_TOKENS, number)

    def _place(self, computing: int, other: int) -> None:
        """Puts the worker that computes the prompt on the first core and the other worker on the second one, where the
        device is cpu and there are two cores."""
        if not self._on_cpu:
            return
        first, *more = available_cores()
        pin(computing, first)
        pin(other, more[0] if more else first)

    async def _ask(self, client: AsyncClient, length: int) -> AskedAnswer:
        return await ask(client, random_prompt(self._random, length, self._vocabulary), MAX_TOKENS)


async def run(
    model: str,
    lengths: Sequence[int],
    repeats: int,
    max_other_load: float,
    tell: Console,
    replicas_per_gpu: int = 1,
) -> list[HandoffRow]:
    """Measures all lengths that fit the model's context."""
    log = HandoffLog()
    kind: Literal["simulated", "torch"] = "simulated" if model == SIMULATED else "torch"
    config = ClusterConfig(
        model=model,
        replicas_per_gpu=replicas_per_gpu,
        engine=EngineConfig(kind=kind),
    )
    devices = lane_devices(config)
    coordinators = {
        "split": CoordinatorConfig(local_prefill="never"),
        "colocated": CoordinatorConfig(local_prefill="always"),
    }
    rows: list[HandoffRow] = []
    with raw_lane(POOL_BYTES, available_cores(), devices) as lane:
        async with running_cluster(config, coordinators, log.on_event) as fronts:
            served = next(m for m in await fronts.clients["split"].models() if m.name == fronts.model)
            bench = HandoffBench(
                fronts, log, lane, served.vocabulary_size, max_other_load, on_cpu=devices == ON_CPU
            )
            await bench.warm_up()
            for length in lengths:
                if length + MAX_TOKENS > served.context_tokens:
                    tell.print(f"{length} tokens: beyond the context of {served.context_tokens}, left out")
                    continue
                times = max(FEWEST_REPEATS, min(repeats, repeats * FULL_REPEATS_UP_TO // length))
                rows.append(make_row(await bench.measure(length, times)))
                tell.print(f"{length} tokens: exposed {rows[-1].exposed_ms_p50:.2f} ms, {times} times")
    return rows


def lane_devices(config: ClusterConfig) -> tuple[str, str]:
    """The devices of the two workers' memory: the first two GPUs, or one that both share."""
    gpus = gpus_of(config).gpus
    return ("cuda:0", f"cuda:{1 % len(gpus)}") if gpus else ON_CPU


def table(rows: Sequence[HandoffRow]) -> Table:
    """The figures for people."""
    columns = (
        *("prompt", "MB", "exposed ms p50", "p95", "GB/s", "raw GB/s", "share", "descriptors", "runs"),
        *("TTFT split ms", "colocated", "difference", "around compute", "second token ms", "normal step ms"),
    )
    shown = Table(title="KV handoff, split against colocated")
    for column in columns:
        shown.add_column(column, justify="right")
    for row in rows:
        figures = (
            *(f"{row.prompt_tokens}", f"{row.bytes / 1e6:.1f}", f"{row.exposed_ms_p50:.2f}"),
            *(f"{row.exposed_ms_p95:.2f}", f"{row.gb_per_s:.1f}", f"{row.raw_gb_per_s:.1f}"),
            *(f"{row.bandwidth_share_of_raw:.2f}", f"{row.descriptors}", f"{row.contiguous_runs}"),
            *(f"{row.ttft_split_ms_p50:.1f}", f"{row.ttft_colocated_ms_p50:.1f}"),
            f"{row.ttft_split_minus_colocated_ms:+.1f}",
            f"{row.around_compute_ms:+.1f}",
            *(f"{row.second_token_gap_ms_p50:.1f}", f"{row.normal_step_ms_p50:.1f}"),
        )
        shown.add_row(*figures)
    return shown


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.handoff", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument("--repeats", type=positive_whole, default=REPEATS, help=f"default: {REPEATS}")
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(part) for part in text.split(",")],
        default=LENGTHS,
        help="prompt tokens, as 16,64,512",
    )
    parser.add_argument(
        "--max-other-load",
        type=positive_number,
        default=MAX_OTHER_LOAD,
        help=f"leave out turns during which others use more of the machine; default: {MAX_OTHER_LOAD}",
    )
    parser.add_argument(
        "--replicas-per-gpu", type=positive_whole, default=1, help="2: both workers on one GPU; default: 1"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    machine = this_machine()
    tell = Console(stderr=True)
    rows = asyncio.run(
        run(
            options.model,
            options.lengths,
            options.repeats,
            options.max_other_load,
            tell,
            replicas_per_gpu=options.replicas_per_gpu,
        )
    )
    if options.json:
        command = shlex.join(["python", "-m", "bench.handoff", *arguments])
        content: dict[str, Any] = {"model": options.model, "rows": [row.as_json() for row in rows]}
        print(json.dumps(report("handoff", command, machine, **content), indent=2))
    else:
        Console().print(table(rows))
    return 0
