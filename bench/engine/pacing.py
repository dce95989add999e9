"""What TPOT targets do to streams and prompts: `python -m bench.engine.pacing [--json]`. About four minutes.

One engine with real weights computes answers one after the other in each of `--streams` slots, and a long prompt each
`--every` seconds besides. Turns with targets and without alternate (A B B A ...), with the same requests. Of each turn:

* tpot_attained: share of the answers whose mean time a token after the first is at most the target;
* gap_p50_ms, gap_p99_ms, gap_max_ms: between consecutive tokens of an answer;
* ttft_p50_ms, ttft_max_ms: of the long prompts, from when they were due;
* prompts, answers: that ended.

The medians over the turns of each kind are printed. Requests of the first two seconds are not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.engine.processes.random_model import loaded_runner
from bench.machine import report, this_machine
from bench.option_values import positive_number, positive_whole
from engine.core.engine import EngineRequest, StopParams
from engine.core.engine_core import EngineCore
from engine.core.model_runner import SamplingParams, warm_up
from splitserve.config.engine import EngineConfig

GREEDY = SamplingParams(temperature=0.0)
TOKENS = range(1000, 30_000)
KV_BYTES = {"cpu": 2**30, "cuda": 2**32}
STREAM_PROMPT = 16
UNCOUNTED_S = 2.0


@dataclass(frozen=True)
class Load:
    """What a turn asks for; times in seconds, lengths in tokens."""

    streams: int
    answer: int
    prompt: int
    every_s: float
    tpot_s: float
    ttft_s: float
    seconds: float


@dataclass
class PacedRequest:
    """Times of one request's tokens."""

    due_s: float
    long: bool
    token_s: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True)
class Row:
    """The figures of a turn, as the module describes them."""

    tpot_attained: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    ttft_p50_ms: float
    ttft_max_ms: float
    prompts: float
    answers: float


class PacedTurn:
    """One turn on an engine that is empty before and after it."""

    def __init__(self, core: EngineCore, load: Load, targets: bool, turn: int) -> None:
        self._core, self._load, self._targets, self._turn = core, load, targets, turn
        self._chance = random.Random(turn)
        self._open: dict[str, PacedRequest] = {}
        self._ended: list[PacedRequest] = []
        self._count = 0

    def run(self) -> Row:
        """Runs the turn. Prompts come on time whatever the engine does; an answer begins when its slot is free."""
        began_s = next_s = time.monotonic()
        end_s = began_s + self._load.seconds
        while (now := time.monotonic()) < end_s:
            while next_s <= now:
                self._ask(self._load.prompt, 1, next_s, long=True)
                next_s += self._load.every_s
            for _ in range(self._load.streams - sum(not request.long for request in self._open.values())):
                self._ask(STREAM_PROMPT, self._load.answer, now, long=False)
            self._step()
        for request_id in list(self._open):
            self._core.abort(request_id)
        while self._core.has_work():
            self._core.step()
        return self._row(began_s + UNCOUNTED_S)

    def _ask(self, prompt: int, answer: int, due_s: float, *, long: bool) -> None:
        self._count += 1
        request_id = f"{self._turn}-{self._targets}-{self._count}"
        self._core.add_request(
            EngineRequest(
                request_id,
                tuple(self._chance.choices(TOKENS, k=prompt)),
                GREEDY,
                StopParams(max_tokens=answer, ignore_eos=True),
                tpot_s=self._load.tpot_s if self._targets else None,
                first_due_s=due_s + self._load.ttft_s if self._targets else float("inf"),
            )
        )
        self._open[request_id] = PacedRequest(due_s, long)

    def _step(self) -> None:
        result, now = self._core.step(), time.monotonic()
        for output in result.outputs:
            request = self._open[output.request_id]
            request.token_s += [now] * len(output.token_ids)
            if output.finish_reason is not None:
                self._ended.append(self._open.pop(output.request_id))

    def _row(self, from_s: float) -> Row:
        counted = [request for request in self._ended if request.due_s >= from_s]
        answers = [request for request in counted if not request.long]
        gaps = sorted(gap for request in answers for gap in request.gaps)
        ttfts = sorted(request.token_s[0] - request.due_s for request in counted if request.long)
        if len(gaps) < 2 or not ttfts:
            raise SystemExit(f"pacing: too few answers ended in {self._load.seconds:g} s; raise --seconds")
        attained = sum(sum(r.gaps) <= self._load.tpot_s * len(r.gaps) for r in answers)
        return Row(
            attained / len(answers),
            median(gaps) * 1e3,
            quantiles(gaps, n=100)[98] * 1e3,
            gaps[-1] * 1e3,
            median(ttfts) * 1e3,
            ttfts[-1] * 1e3,
            len(ttfts),
            len(answers),
        )


def engine_of(model: str, threads: int, device: str, *, random_weights: bool) -> EngineCore:
    """A warm engine on this many cores, without a prefix cache. `random_weights`: see `loaded_runner`."""
    config = EngineConfig(
        dtype="bfloat16",
        device=device,
        threads=threads,
        kv_memory_bytes=KV_BYTES["cpu" if device == "cpu" else "cuda"],
        prefix_cache=False,
    )
    runner, tokenizer = loaded_runner(model, config, random_weights=random_weights)
    warm_up(runner, None)
    return EngineCore(runner, config, tokenizer)


def medians_of_turns(core: EngineCore, load: Load, turns: int) -> list[dict[str, Any]]:
    """Runs so many turns with targets and so many without, in the order A B B A; the medians of each kind."""
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for turn in range(turns):
        for targets in (True, False) if turn % 2 == 0 else (False, True):
            rows[targets].append(asdict(PacedTurn(core, load, targets, turn).run()))
    return [
        {"targets": kind, **{name: round(median(row[name] for row in own), 3) for name in own[0]}}
        for kind, own in rows.items()
    ]


def main(arguments: Sequence[str]) -> None:
    """Measures, and prints a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.pacing")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--random-weights", action="store_true", help="--model is a folder with a config.json"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=positive_whole, default=1)
    parser.add_argument("--streams", type=positive_whole, default=4)
    parser.add_argument("--answer", type=positive_whole, default=64, help="tokens of an answer")
    parser.add_argument("--prompt", type=positive_whole, default=512, help="tokens of a long prompt")
    parser.add_argument("--every", type=positive_number, default=2.5, help="seconds between long prompts")
    parser.add_argument("--tpot", type=positive_number, default=0.05, help="seconds a token")
    parser.add_argument(
        "--ttft", type=positive_number, default=2.0, help="seconds to the first token of a long prompt"
    )
    parser.add_argument("--seconds", type=positive_number, default=20.0, help="of a turn")
    parser.add_argument("--turns", type=positive_whole, default=5, help="of each kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    load = Load(
        options.streams,
        options.answer,
        options.prompt,
        options.every,
        options.tpot,
        options.ttft,
        options.seconds,
    )
    machine = this_machine()
    core = engine_of(options.model, options.threads, options.device, random_weights=options.random_weights)
    rows = medians_of_turns(core, load, options.turns)
    if options.json:
        command = shlex.join(["python", "-m", "bench.engine.pacing", *arguments])
        print(json.dumps(report("pacing", command, machine, load=asdict(load), rows=rows)))
        return
    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
