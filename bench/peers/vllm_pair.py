"""splitserve's pair beside vLLM's: `python -m bench.peers.vllm_pair` (`make peer-vllm` makes the environment too).

Starts one prefill and one decode worker of splitserve, and vLLM's prefill and decode servers (NixlConnector over
DRAM), all in bfloat16 with one core for each worker's compute. The two systems take turns with the same prompts, one
request at a time, greedy; no prompt is used twice. All times are taken at the client.

* prefill: request sent until prefill's first token is known. splitserve delivers it: the first token has come.
  vLLM: the prefill server has answered.
* handoff: from there until the first token that the decode worker computed has come. That is splitserve's second
  token, and vLLM's first, for its decode server computes the prompt's last token again. Both contain the
  transfer's rest, admission and one decode step.
* TTFT: request sent until the client has a token. For vLLM that is prefill and handoff: no token leaves the pair
  before decode's first. A front that passed on the prefill server's token would have it after `prefill`.
* second: between the first and the second token.
* TPOT: mean time between the tokens of the decode worker.

Each cell is the median over the repeats; turns in which other processes used more than `--max-other-load` of the
machine are left out, up to twice as many as are wanted. vLLM's processes are stopped while splitserve has its turn,
because their NIXL threads use the cores even when idle. idle_cores says how many cores' time each system uses so.
A ratio is splitserve's by vLLM's; below 1 splitserve is faster. vLLM has no proxy here: the client calls both servers
itself, which spares it a hop. splitserve's coordinator is on the way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.asking import ask, random_prompt
from bench.cluster import running_cluster
from bench.machine import OtherLoad, report, this_machine
from bench.option_values import positive_number, positive_whole, whole_number
from bench.peers.vllm_client import VllmPair
from bench.peers.vllm_server import Layout, RunningPair, running_pair
from launcher.cluster.placement import available_cores
from splitserve.client import AsyncClient
from splitserve.config.cluster import ClusterConfig
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.engine import EngineConfig
from splitserve.models.sources import resolve_model

MODEL = "smollm2-135m-instruct"
LENGTHS = (16, 128, 512, 1000, 2000)
REPEATS = 11
MAX_TOKENS = 24
MAX_OTHER_LOAD = 0.1
HOPES = 2
WARM_UP_TURNS = 2
SETTLE_S = 0.3
"""Wait after vLLM's processes resume and before they are paused again, seconds."""
IDLE_S = 5.0
FRONT = "split"


@dataclass(frozen=True)
class Times:
    """Milliseconds of one request, or their medians; the module says what each is."""

    prefill_ms: float
    handoff_ms: float
    ttft_ms: float
    second_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class VllmPairTurn:
    """One prompt through both. `equal_tokens`: share of equal output tokens, to detect a wrong run."""

    splitserve: Times
    vllm: Times
    equal_tokens: float
    other_load: float = 0.0


@dataclass(frozen=True)
class VllmPairRow:
    """One prompt length; `equal_tokens` is a mean, all else medians."""

    prompt_tokens: int
    repeats: int
    other_load: float
    splitserve: Times
    vllm: Times
    ratio: Times
    equal_tokens: float


async def ask_splitserve(
    client: AsyncClient, prompt: Sequence[int], max_tokens: int
) -> tuple[Times, tuple[int, ...]]:
    """One request through splitserve."""
    answer = await ask(client, prompt, max_tokens)
    first_s, second_s = answer.token_s[0], answer.second_token_gap_s
    return _times(first_s, second_s, first_s, second_s, answer.token_s[1:]), answer.token_ids


async def ask_vllm(pair: VllmPair, prompt: Sequence[int], max_tokens: int) -> tuple[Times, tuple[int, ...]]:
    """One request through vLLM's pair."""
    answer = await asyncio.to_thread(pair.generate, prompt, max_tokens)
    first_s, second_s = answer.token_s[:2]
    handoff_s = first_s - answer.prefilled_s
    times = _times(answer.prefilled_s, handoff_s, first_s, second_s - first_s, answer.token_s)
    return times, answer.token_ids


class VllmPairBench:
    """Alternates both systems over fresh prompts; the first one changes from prompt to prompt."""

    def __init__(self, client: AsyncClient, pair: RunningPair, arguments: argparse.Namespace) -> None:
        self._client, self._pair = client, pair
        self._max_tokens: int = arguments.max_tokens
        self._max_other_load: float = arguments.max_other_load
        self._random = random.Random(arguments.seed)
        self._load = OtherLoad()

    async def row(self, length: int, repeats: int) -> VllmPairRow:
        """`repeats` turns at one prompt length, after a few that are not counted."""
        for number in range(WARM_UP_TURNS):
            await self._turn(length, number)
        turns: list[VllmPairTurn] = []
        hopes = HOPES * repeats
        while len(turns) < repeats:
            self._load.mark()
            turn = await self._turn(length, len(turns))
            turn = replace(turn, other_load=self._load.share())
            if turn.other_load > self._max_other_load and hopes > 0:
                hopes -= 1
                continue
            turns.append(turn)
        return make_row(length, turns)

    async def _turn(self, length: int, number: int) -> VllmPairTurn:
        prompt = random_prompt(self._random, length)
        if number % 2:
            vllm, vllm_ids = await self._ask_vllm(prompt)
            own, own_ids = await ask_splitserve(self._client, prompt, self._max_tokens)
        else:
            own, own_ids = await ask_splitserve(self._client, prompt, self._max_tokens)
            vllm, vllm_ids = await self._ask_vllm(prompt)
        equal = sum(a == b for a, b in zip(own_ids, vllm_ids, strict=True)) / self._max_tokens
        return VllmPairTurn(own, vllm, equal)

    async def _ask_vllm(self, prompt: Sequence[int]) -> tuple[Times, tuple[int, ...]]:
        self._pair.resume()
        await asyncio.sleep(SETTLE_S)
        try:
            return await ask_vllm(self._pair.client, prompt, self._max_tokens)
        finally:
            await asyncio.sleep(SETTLE_S)
            self._pair.pause()


def make_row(length: int, turns: Sequence[VllmPairTurn]) -> VllmPairRow:
    """The medians of these turns, and how the two compare."""
    own, vllm = _medians([turn.splitserve for turn in turns]), _medians([turn.vllm for turn in turns])
    quotients = {name: round(value / asdict(vllm)[name], 3) for name, value in asdict(own).items()}
    return VllmPairRow(
        length,
        len(turns),
        round(median(turn.other_load for turn in turns), 3),
        own,
        vllm,
        Times(**quotients),
        round(fmean(turn.equal_tokens for turn in turns), 3),
    )


async def compare(arguments: argparse.Namespace, tell: Console) -> dict[str, Any]:
    """Runs both systems side by side and measures every length: `rows` and `idle_cores` of the report."""
    cores = available_cores()
    model = resolve_model(arguments.model)
    config = ClusterConfig(
        model=arguments.model, engine=EngineConfig(kind=arguments.engine, dtype="bfloat16")
    )
    fronts_wanted = {FRONT: CoordinatorConfig(local_prefill="never")}
    with tempfile.TemporaryDirectory(prefix="vllm-logs-") as logs:
        layout = Layout(
            environment=arguments.environment.resolve(),
            model=model.path,
            log_dir=arguments.log_dir or Path(logs),
            cores=(cores[:1], cores[1:2] or cores),
            eager=arguments.vllm_eager,
            whole_server=arguments.vllm_whole_server,
        )
        async with (
            running_pair(layout) as pair,
            running_cluster(config, fronts_wanted, lambda _event: None) as fronts,
        ):
            vllm = {process.pid for process in pair.family()}
            own = [p for p in psutil.Process().children(recursive=True) if p.pid not in vllm]
            idle = {"splitserve": await idle_cores(own), "vllm": await idle_cores(pair.family())}
            tell.print(f"idle: {idle} cores")
            pair.pause()
            bench = VllmPairBench(fronts.clients[FRONT], pair, arguments)
            rows = []
            for length in arguments.lengths:
                rows.append(await bench.row(length, arguments.repeats))
                tell.print(rows[-1])
            return {"rows": rows, "idle_cores": idle}


async def idle_cores(processes: Sequence[psutil.Process]) -> float:
    """Cores used by these processes while idle."""
    await asyncio.sleep(SETTLE_S)
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    await asyncio.sleep(IDLE_S)
    return round((sum(sum(process.cpu_times()[:2]) for process in processes) - before) / IDLE_S, 3)


def table(rows: Sequence[VllmPairRow]) -> Table:
    """splitserve / vLLM (ratio) in each cell."""
    shown = Table(title="p50 in ms: splitserve / vLLM (ratio)")
    for column in ("prompt", "prefill", "handoff", "TTFT", "first to second", "TPOT", "equal tokens"):
        shown.add_column(column, justify="right")
    for row in rows:
        own, vllm, ratio = asdict(row.splitserve), asdict(row.vllm), asdict(row.ratio)
        cells = [f"{own[name]:.1f} / {vllm[name]:.1f} ({ratio[name]:.2f})" for name in own]
        shown.add_row(str(row.prompt_tokens), *cells, f"{row.equal_tokens:.0%}")
    return shown


def main() -> None:
    """Progress goes to stderr, the result to stdout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument(
        "--engine",
        choices=("torch", "vllm"),
        default="torch",
        help="splitserve's; vllm where this runs in an environment that has it",
    )
    parser.add_argument("--lengths", type=positive_whole, nargs="+", default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--repeats", type=positive_whole, default=REPEATS)
    parser.add_argument("--max-tokens", type=positive_whole, default=MAX_TOKENS)
    parser.add_argument("--max-other-load", type=positive_number, default=MAX_OTHER_LOAD, metavar="SHARE")
    parser.add_argument("--seed", type=whole_number, default=1)
    parser.add_argument(
        "--environment", type=Path, default=Path(".peers/vllm"), help="made by `make peer-vllm`"
    )
    parser.add_argument("--vllm-eager", action="store_true", help="run vLLM without torch.compile")
    parser.add_argument(
        "--vllm-whole-server",
        action="store_true",
        help="bind vLLM's API servers to the workers' cores too, not the compute alone",
    )
    parser.add_argument("--log-dir", type=Path, help="keep vLLM's logs there")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    machine = this_machine()
    result = asyncio.run(compare(arguments, Console(stderr=True)))
    if arguments.json:
        rows = [asdict(row) for row in result["rows"]]
        command = shlex.join(["python", "-m", "bench.peers.vllm_pair", *sys.argv[1:]])
        print(json.dumps(report("vllm_pair", command, machine, **{**result, "rows": rows}), indent=2))
    else:
        Console().print(table(result["rows"]))


def _times(
    prefill_s: float, handoff_s: float, ttft_s: float, second_s: float, decoded_s: Sequence[float]
) -> Times:
    tpot_s = (decoded_s[-1] - decoded_s[0]) / (len(decoded_s) - 1)
    return Times(*(value * 1e3 for value in (prefill_s, handoff_s, ttft_s, second_s, tpot_s)))


def _medians(samples: Sequence[Times]) -> Times:
    rows = [asdict(sample) for sample in samples]
    return Times(**{name: round(median(row[name] for row in rows), 3) for name in rows[0]})


if __name__ == "__main__":
    main()
