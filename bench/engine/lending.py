"""What cores lent between steps do to a neighbour's prompts: `python -m bench.engine.lending [--json]`. Some minutes.

Two processes on a core each, with real weights: the owner decodes streams, the borrower computes one prompt after the
other in chunks as a prefill worker does. Turns in which streams have a target, so that the owner lends its core, and
turns in which they have none alternate (A B B A ...).

* prompt_p50_ms, prompt_min_ms: time of a prompt;
* tpot_mean_ms: of the streams, while prompts are computed;
* tpot_worst_ms: the largest mean time of a stream's tokens up to any of them;
* gap_max_ms: the longest gap between two tokens.

The medians over the turns of each kind are printed; of worst and longest the largest, of the least the least.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.engine.turns import GREEDY, TOKENS, engine_of, show
from bench.machine import this_machine
from bench.option_values import positive_number, positive_whole
from engine.core.engine_core import EngineCore
from engine.core.types import EngineRequest, StopParams
from engine.pacing.token_clock import ServiceTargets

STREAM_PROMPT = 16
AHEAD_TOKENS = 20
"""Tokens that each stream has before the first prompt: the engine then knows what a step takes."""
PAUSE_S = 0.2
"""Between two prompts: streams get ahead of their target."""
LONGEST = 4000


def _ask(core: EngineCore, name: str, prompt: int, answer: int, tpot_s: float | None) -> None:
    tokens = tuple(random.Random(name).choices(TOKENS, k=prompt))
    stop = StopParams(max_tokens=answer, ignore_eos=True)
    core.add_request(
        EngineRequest(name, tokens, GREEDY, stop, targets=ServiceTargets(tpot_s=tpot_s) if tpot_s else None)
    )


def own(connection: Connection, core: EngineCore, tpot_s: float) -> None:
    """Decodes: takes (whether to lend, streams), answers once streams are ahead, and again, when told, with the times
    of their tokens. Waits for work as the engine thread does."""
    turn = 0
    while (asked := connection.recv()) is not None:
        lends, streams = asked
        turn += 1
        times: dict[str, list[float]] = {f"{turn}-{number}": [] for number in range(streams)}
        for name in times:
            _ask(core, name, STREAM_PROMPT, LONGEST, tpot_s if lends else None)
        ahead = False
        while not connection.poll(0 if core.has_work() else _sleep_s(core)):
            if core.has_work():
                _step(core, times)
            if not ahead and min(map(len, times.values())) >= AHEAD_TOKENS:
                ahead = True
                connection.send(None)
        connection.recv()
        for name in times:
            core.abort(name)
        connection.send(list(times.values()))


def _sleep_s(core: EngineCore) -> float:
    return min(max(0.0, core.next_deadline() - time.monotonic()), 1.0)


def _step(core: EngineCore, times: dict[str, list[float]]) -> None:
    result, now = core.step(), time.monotonic()
    for output in result.outputs:
        times[output.request_id] += [now] * len(output.token_ids)


def borrow(connection: Connection, core: EngineCore) -> None:
    """Computes prompts: takes a length, answers with the seconds until the first token."""
    count = 0
    while (length := connection.recv()) is not None:
        count += 1
        _ask(core, str(count), length, 1, None)
        began_s = time.monotonic()
        while core.has_work():
            core.step()
        connection.send(time.monotonic() - began_s)


def serve(connection: Connection, what: str, model: str, exchange: Path, tpot_s: float) -> None:
    """A child process: an engine that will `own` or `borrow`."""
    core = engine_of(model, 1, exchange)
    connection.send(None)
    if what == "own":
        own(connection, core, tpot_s)
    else:
        borrow(connection, core)
    core.close()


class LendingTurns:
    """Both processes, on a core each."""

    def __init__(self, model: str, exchange: Path, tpot_s: float, cores: Sequence[int]) -> None:
        self._ends: list[Connection] = []
        self._processes = []
        before = os.sched_getaffinity(0)
        spawning = multiprocessing.get_context("spawn")
        for what, core in zip(("own", "borrow"), cores, strict=True):
            here, there = spawning.Pipe()
            os.sched_setaffinity(0, {core})  # before the libraries of the child count its cores
            process = spawning.Process(target=serve, args=(there, what, model, exchange, tpot_s), daemon=True)
            process.start()
            self._ends.append(here)
            self._processes.append(process)
        os.sched_setaffinity(0, before)
        for end in self._ends:
            end.recv()

    def turn(self, lends: bool, streams: int, prompt: int, prompts: int) -> dict[str, float]:
        """One turn, as a row of figures in seconds."""
        owner, borrower = self._ends
        owner.send((lends, streams))
        owner.recv()
        began_s = time.monotonic()
        taken_s = []
        for _ in range(prompts):
            borrower.send(prompt)
            taken_s.append(borrower.recv())
            time.sleep(PAUSE_S)
        owner.send(None)
        row = {"prompt_p50": median(taken_s), "prompt_min": min(taken_s)}
        times = owner.recv()
        during = [[now for now in own if now >= began_s] for own in times]
        row["tpot_mean"] = mean((own[-1] - own[0]) / (len(own) - 1) for own in during)
        row["tpot_worst"] = max((now - own[0]) / k for own in times for k, now in enumerate(own) if k)
        row["gap_max"] = max(after - own[k] for own in times for k, after in enumerate(own[1:]))
        return row

    def close(self) -> None:
        """Ends both."""
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()


_COMBINED = {"prompt_min": min, "tpot_worst": max, "gap_max": max}


def main(arguments: Sequence[str]) -> None:
    """Measures, and prints a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.lending")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=positive_whole, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompt", type=positive_whole, default=768, help="tokens of a prompt")
    parser.add_argument("--prompts", type=positive_whole, default=3, help="of a turn")
    parser.add_argument("--tpot", type=positive_number, default=0.05, help="seconds a token")
    parser.add_argument("--turns", type=positive_whole, default=6, help="of each kind and number of streams")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("lending: one core has nobody to lend to")
    machine = this_machine()
    found: dict[tuple[int, bool], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        turns = LendingTurns(options.model, Path(folder, "cores"), options.tpot, cores)
        for streams in options.streams:
            turns.turn(False, streams, options.prompt, 1)  # what is captured first
        for turn in range(options.turns):
            for streams in options.streams:
                for lends in (True, False) if turn % 2 == 0 else (False, True):
                    row = turns.turn(lends, streams, options.prompt, options.prompts)
                    found.setdefault((streams, lends), []).append(row)
                    shown = {name: round(value * 1e3, 1) for name, value in row.items()}
                    print(f"{streams} streams, lent: {lends}, ms: {shown}", file=sys.stderr, flush=True)
        turns.close()
    rows: list[dict[str, Any]] = [
        {"streams": streams, "lent": lends}
        | {
            f"{name}_ms": round(_COMBINED.get(name, median)([row[name] for row in own]) * 1e3, 1)
            for name in own[0]
        }
        for (streams, lends), own in sorted(found.items())
    ]
    load = {"prompt": options.prompt, "tpot": options.tpot, "turns": options.turns}
    show("lending", arguments, machine, rows, as_json=options.json, load=load)


if __name__ == "__main__":
    main(sys.argv[1:])
