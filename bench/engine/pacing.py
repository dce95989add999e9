"""What the token clock does to streams and prompts: `python -m bench.engine.pacing [--json]`. About four minutes.

One engine with real weights computes answers one after the other in each of `--streams` slots, and a long prompt each
`--every` seconds besides. Turns with targets and without alternate (A B B A ...), with the same requests. Of each turn:

* tpot_attained: share of the answers whose mean time a token after the first is at most the target;
* gap_p50_ms, gap_p99_ms, gap_max_ms: between consecutive tokens of an answer;
* ttft_p50_ms, ttft_max_ms: of the long prompts, from when they were due;
* prompts, answers: that ended.

The medians over the turns of each kind are printed. Requests of the first two seconds are not counted.

`--misjudged 0.67 1 1.5` runs turns with targets alone, the factors in turns, each on an engine of its own that takes
all steps for so many times as long as they are; `tpot_attained` is then of all answers of a factor, which are added up.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any, TypeVar

from bench.engine.turns import GREEDY, TOKENS, engine_of, medians_of_turns, show
from bench.machine import this_machine
from bench.option_values import positive_number, positive_whole
from engine.core.engine_core import EngineCore
from engine.core.step_stats import StepMeter
from engine.core.types import EngineRequest, StopParams
from engine.pacing.step_time_fit import PromptTimeFit, StepTimeFit
from engine.pacing.token_clock import ServiceTargets

_Engine = TypeVar("_Engine")
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
    """One kind of turn; see the module."""

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
        targets = ServiceTargets(self._load.tpot_s, self._load.ttft_s, due_s + self._load.ttft_s)
        self._core.add_request(
            EngineRequest(
                request_id,
                tuple(self._chance.choices(TOKENS, k=prompt)),
                GREEDY,
                StopParams(max_tokens=answer, ignore_eos=True),
                targets=targets if self._targets else None,
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


def misjudging_meter(factor: float) -> StepMeter:
    """A meter that takes each step for `factor` times as long as it was, decodes and prompts alike."""
    meter = StepMeter()
    meter.fit, meter.prompt_fit = _StepTimes(factor), _PromptTimes(factor)
    return meter


class _StepTimes(StepTimeFit):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def record(self, sequences: int, context_tokens: int, duration_s: float) -> None:
        super().record(sequences, context_tokens, duration_s * self._factor)


class _PromptTimes(PromptTimeFit):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def record(self, tokens: int, pairs: float, duration_s: float) -> None:
        super().record(tokens, pairs, duration_s * self._factor)

    def record_mixed(self, tokens: int, pairs: float, decode_s: float, duration_s: float) -> None:
        """`decode_s` is of the fit above, so it is wrong by the factor already."""
        super().record_mixed(tokens, pairs, decode_s, duration_s * self._factor)


def misjudged_rows(
    turns: int, engines: dict[float, _Engine], run: Callable[[_Engine, int], Row]
) -> list[dict[str, Any]]:
    """A row for each factor: its engine's turns, which alternate with the others' (A B C C B A ...)."""
    found: dict[float, list[Row]] = {factor: [] for factor in engines}
    for turn in range(turns):
        for factor in engines if turn % 2 == 0 else reversed(engines):
            found[factor].append(run(engines[factor], turn))
    return [{"factor": factor, **_pooled(rows)} for factor, rows in found.items()]


def _pooled(rows: Sequence[Row]) -> dict[str, float]:
    answers = sum(row.answers for row in rows)
    medians = {name: median(asdict(row)[name] for row in rows) for name in asdict(rows[0])}
    attained = sum(row.tpot_attained * row.answers for row in rows) / answers
    prompts = sum(row.prompts for row in rows)
    figures = {**medians, "tpot_attained": attained, "answers": answers, "prompts": prompts}
    return {name: round(value, 3) for name, value in figures.items()}


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
    parser.add_argument("--misjudged", type=positive_number, nargs="+", metavar="FACTOR", help="see above")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if len(set(options.misjudged or ())) < len(options.misjudged or ()):
        parser.error("--misjudged: each factor only once")
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

    def engine(meter: StepMeter | None = None) -> EngineCore:
        return engine_of(
            options.model,
            options.threads,
            meter=meter,
            device=options.device,
            random_weights=options.random_weights,
        )

    if options.misjudged:
        cores = {factor: engine(misjudging_meter(factor)) for factor in options.misjudged}
        rows = misjudged_rows(
            options.turns, cores, lambda core, turn: PacedTurn(core, load, True, turn).run()
        )
    else:
        core = engine()
        rows = medians_of_turns(
            options.turns, lambda turn, targets: PacedTurn(core, load, targets, turn).run()
        )
    show("pacing", arguments, machine, rows, as_json=options.json, load=asdict(load))


if __name__ == "__main__":
    main(sys.argv[1:])
