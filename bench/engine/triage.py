"""What triage does to first tokens when prompts are too many: `python -m bench.engine.triage [--json]`. Six minutes.

One engine with real weights computes prompts only, as a prefill worker does. They arrive at random, open loop, `--rate`
a second; `--long-share` of them have `--long` tokens, the others `--short`. Turns with targets and without alternate
(A B B A ...), with the same arrivals; without targets the order is that of arrival. Of each turn:

* attained: share of all prompts that were asked for whose first token came within `--ttft`;
* attained_short, attained_long: the same by length;
* ttft_p50_ms, ttft_max_ms, and ttft_long_max_ms;
* prompts: that were asked for.

The medians over the turns of each kind are printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from bench.engine.turns import GREEDY, TOKENS, engine_of, medians_of_turns, show
from bench.machine import this_machine
from bench.option_values import positive_number, positive_whole
from engine.core.engine_core import EngineCore
from engine.core.types import EngineRequest, StopParams
from engine.pacing.token_clock import ServiceTargets


@dataclass(frozen=True)
class PromptMix:
    """What a turn asks for; times in seconds, lengths in tokens."""

    rate: float
    short: int
    long: int
    long_share: float
    ttft_s: float
    prompts: int


@dataclass(frozen=True)
class TriageRow:
    """One kind of turn; see the module."""

    attained: float
    attained_short: float
    attained_long: float
    ttft_p50_ms: float
    ttft_max_ms: float
    ttft_long_max_ms: float
    prompts: float


class TriagedTurn:
    """One turn on an engine that is empty before and after it."""

    def __init__(self, core: EngineCore, mix: PromptMix, targets: bool, turn: int) -> None:
        self._core, self._mix, self._targets, self._turn = core, mix, targets, turn
        self._chance = random.Random(turn)
        self._due: dict[str, tuple[float, int]] = {}
        self._ttft_s: dict[str, float] = {}

    def run(self) -> TriageRow:
        """Runs the turn until every prompt has its first token."""
        at_s, arrivals = time.monotonic(), []
        for _ in range(self._mix.prompts):
            at_s += self._chance.expovariate(self._mix.rate)
            arrivals.append((at_s, self._chance.random() < self._mix.long_share))
        arrivals.reverse()
        while arrivals or self._core.has_work():
            while arrivals and arrivals[-1][0] <= time.monotonic():
                self._ask(*arrivals.pop())
            if self._core.has_work():
                self._step()
            else:
                time.sleep(max(0.0, arrivals[-1][0] - time.monotonic()))
        return self._row()

    def _ask(self, due_s: float, long: bool) -> None:
        tokens = self._mix.long if long else self._mix.short
        request_id = f"{self._turn}-{self._targets}-{len(self._due)}"
        targets = ServiceTargets(None, self._mix.ttft_s, due_s + self._mix.ttft_s)
        self._core.add_request(
            EngineRequest(
                request_id,
                tuple(self._chance.choices(TOKENS, k=tokens)),
                GREEDY,
                StopParams(max_tokens=2, ignore_eos=True),
                prefill_only=True,
                targets=targets if self._targets else None,
            )
        )
        self._due[request_id] = due_s, tokens

    def _step(self) -> None:
        result, now = self._core.step(), time.monotonic()
        for output in result.outputs:
            self._ttft_s[output.request_id] = now - self._due[output.request_id][0]
            self._core.release_held(output.request_id)

    def _row(self) -> TriageRow:
        by_length: dict[bool, list[float]] = {True: [], False: []}
        for request_id, (_, tokens) in self._due.items():
            by_length[tokens == self._mix.long].append(self._ttft_s[request_id])
        both = [*by_length[True], *by_length[False]]
        return TriageRow(
            self._attained(both),
            self._attained(by_length[False]),
            self._attained(by_length[True]),
            median(both) * 1e3,
            max(both) * 1e3,
            max(by_length[True], default=0.0) * 1e3,
            len(both),
        )

    def _attained(self, ttfts: Sequence[float]) -> float:
        return sum(ttft_s <= self._mix.ttft_s for ttft_s in ttfts) / len(ttfts) if ttfts else 1.0


def main(arguments: Sequence[str]) -> None:
    """Measures, and prints a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.triage")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=positive_whole, default=1)
    parser.add_argument("--rate", type=positive_number, default=4.0, help="prompts a second")
    parser.add_argument("--short", type=positive_whole, default=96, help="tokens of a short prompt")
    parser.add_argument("--long", type=positive_whole, default=768, help="tokens of a long prompt")
    parser.add_argument("--long-share", type=positive_number, default=0.25)
    parser.add_argument("--ttft", type=positive_number, default=1.0, help="seconds to the first token")
    parser.add_argument("--prompts", type=positive_whole, default=100, help="of a turn")
    parser.add_argument("--turns", type=positive_whole, default=5, help="of each kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    mix = PromptMix(
        options.rate, options.short, options.long, options.long_share, options.ttft, options.prompts
    )
    machine = this_machine()
    core = engine_of(options.model, options.threads)
    TriagedTurn(core, mix, True, -1).run()  # measures the steps, and makes what is made when first needed
    rows = medians_of_turns(options.turns, lambda turn, targets: TriagedTurn(core, mix, targets, turn).run())
    show("triage", arguments, machine, rows, as_json=options.json, mix=asdict(mix))


if __name__ == "__main__":
    main(sys.argv[1:])
