"""What drafts save: `python -m bench.engine.speculation`.

Each prompt is answered greedily and with a seed, plainly and with speculation in turns, one after the other by the same
model: milliseconds a token after the first one, and the ratio of each pair of neighbours, of CPU time, too. `same`:
whether all answers were the same, token for token. Kinds: `copy`, answers that repeat much of their prompts (a summary
of quoted sentences, a corrected text, changed code); `free`, answers that do not; `mixed`. `several`: four prompts at a
time; `eight` and `many`: 8 and 32, whose answers go on to `--tokens` where others end as the model ends them.

`counted` is the ratio in virtual time, see `counted.py`, with the tokens and rows of a step: what other processes do
has no part in it. `--turns 0` counts only.

Drafts are by prompt lookup, or with `--without-layers` by a draft model: the model itself without these layers. It
says mostly the same, and takes nearly as long, so that it never pays here. `counted` then has what a draft model would
save that is right as often and takes `--draft-costs` of the model's time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.engine.speculation.counted import CostingRunner, VirtualTime, counted
from bench.engine.speculation.draft_pairs import without_layers
from bench.engine.turns import show
from bench.machine import this_machine
from bench.option_values import positive_number, positive_whole
from engine.core.engine_core import EngineCore
from engine.core.model_runner import warm_up
from engine.core.types import EngineRequest, SamplingParams, StopParams
from engine.runner.draft_runner import load_draft_model
from engine.runner.torch_runner import build_torch_runner
from engine.speculation.draft_lengths import MAX_SEQUENCES
from engine.speculation.draft_model import DraftModel
from engine.speculation.settings import make_drafter, warm_up_drafts
from splitserve.config.engine import EngineConfig
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import resolve_model
from splitserve.models.tokenizer import Tokenizer, Turn

MODEL = "smollm2-135m-instruct"
REPORT = (
    "The harbour of Norwick was rebuilt in three stages. The first stage, finished in the spring, replaced the"
    " old wooden pier with a stone one. The second stage deepened the basin, so that larger ships can now enter at"
    " low tide. The third stage, which the council approved last week, adds a market hall and forty berths for"
    " fishing boats. The harbour master expects that the number of visiting ships will double within two years."
    " Residents of the old quarter complain about the noise of the night deliveries, and the council has promised"
    " to limit them to ten hours a day. The whole project costs twelve million, of which the region pays a third."
)
MAIL = (
    "Dear Ms Hollis, thank you for you're letter of the third of May. We have recieved the two boxes with the lamps,"
    " but one of the lamps dont work and the other has a scratch on it's foot. We would like too exchange both lamps"
    " for new ones. Our driver can bring the boxes to you're shop on Friday, if that is convenient for you. Please let"
    " us know at what time your shop open. We are looking forward to hear from you. With kind regards, Peter Aldous"
)
CODE = """def total_price(items, discount):
    total = 0
    for item in items:
        if item.price < 0:
            raise ValueError("negative price")
        total = total + item.price * item.quantity
    if discount > 0:
        total = total - total * discount
    return total


def print_receipt(items, discount):
    for item in items:
        print(item.name, item.quantity, item.price)
    print("total", total_price(items, discount))
"""
COPY = {
    "summary": f"Repeat the sentences of this report that matter, word for word, in their order.\n\n{REPORT}",
    "edit": f"Correct the spelling and grammar of this letter and write out the whole letter.\n\n{MAIL}",
    "code": f"Rename `discount` to `rebate` in this Python code and print all of the code.\n\n```python\n{CODE}```",
}
FREE = {
    "story": "Write a story about a lighthouse keeper who finds a strange bird on a stormy night.",
    "explain": "Explain how vaccines work and why some of them need more than one dose.",
    "advice": "What should I think about before I move from a small village to a big city?",
    "chat": "I had a bad day at work today. Can you cheer me up a little?",
}
SEVERAL = 4
"""Prompts whose answers end where the model ends them. More of them go on to `--tokens`, so that all stay a batch."""
BATCHES = ("several", "eight", "many")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)


@dataclass(frozen=True)
class Answer:
    """The tokens of a turn's prompts, and milliseconds a token of each prompt after its first."""

    tokens: list[list[int]]
    ms_a_token: float
    cpu_ms_a_token: float


def ask(core: EngineCore, prompts: list[list[int]], sampling: SamplingParams, stop: StopParams) -> Answer:
    """Answers the prompts together."""
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        core.add_request(EngineRequest(str(number), tuple(prompt), sampling, stop))
    began, cpu, before = 0.0, 0.0, 0
    while core.has_work():
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids
        if not began and all(tokens.values()):
            began, cpu, before = time.perf_counter(), time.process_time(), sum(map(len, tokens.values()))
    spent, cpu_spent = time.perf_counter() - began, time.process_time() - cpu
    each = 1e3 * len(prompts) / (sum(map(len, tokens.values())) - before)
    return Answer(list(tokens.values()), spent * each, cpu_spent * each)


class Bench:
    """Two engines over one model, of which one works at a time: with speculation and without."""

    def __init__(self, dtype: str, threads: int, draft_model: Path | None, costs: Sequence[float]) -> None:
        """`draft_model`: its folder; None: prompt lookup. `costs`: of it, in steps of the model, to count with."""
        values = {"dtype": dtype, "threads": threads, "kv_memory_bytes": 2**29, "prefix_cache": False}
        given = {"speculation": "prompt-lookup"}
        if draft_model is not None:
            given = {"speculation": "draft-model", "draft_model": str(draft_model)}
        config = EngineConfig.model_validate({**values, **given})
        source = resolve_model(MODEL)
        draft = load_draft_model(config, source)
        beside = draft.block_bytes if draft else 0
        runner = build_torch_runner(config, source, lambda _fraction: None, beside_bytes=beside)
        warm_up(runner, None, drafts=warm_up_drafts(config))
        self._tokenizer = load_tokenizer(source.tokenizer_source)
        self._config, self._facts, self._costs = config, runner.facts, costs if draft else ()
        self._draft_runner = draft.runner(runner.num_blocks) if draft else None
        self._plain = EngineCore(runner, config, self._tokenizer)
        drafter = make_drafter(config, self._draft_runner, self._facts.vocabulary_size)
        self._drafting = EngineCore(runner, config, self._tokenizer, drafter=drafter)

    def row(
        self, kind: str, name: str, texts: list[str], sampling: SamplingParams, turns: int, count: int
    ) -> Any:
        """One row of the report."""
        prompts = [chat(self._tokenizer, text) for text in texts]
        totals = self._drafting.step_totals["decode"]
        drafted, accepted = totals.drafted_tokens, totals.accepted_tokens
        ends = frozenset[int]() if len(prompts) > SEVERAL else self._facts.eos_token_ids
        stop = StopParams(max_tokens=count, eos_token_ids=ends)
        known = ask(self._plain, prompts, sampling, stop).tokens
        plain: list[Answer] = []
        drafting: list[Answer] = []
        for turn in range(turns):
            answers = {}
            for core in (self._plain, self._drafting) if turn % 2 == 0 else (self._drafting, self._plain):
                answers[core] = ask(core, prompts, sampling, stop)
            plain.append(answers[self._plain])
            drafting.append(answers[self._drafting])
        pairs = list(zip(plain, drafting, strict=True))
        tokens = max(1, turns * sum(map(len, known)))
        row = {
            "kind": kind,
            "prompt": name,
            "sampled": not sampling.greedy,
            "batch": len(prompts),
            **self._counted(prompts, sampling, known),
        }
        if not turns:
            return row
        return row | {
            "plain_ms": round(median(one.ms_a_token for one in plain), 2),
            "drafting_ms": round(median(one.ms_a_token for one in drafting), 2),
            "ratio": round(median(a.ms_a_token / b.ms_a_token for a, b in pairs), 3),
            "cpu_ratio": round(median(a.cpu_ms_a_token / b.cpu_ms_a_token for a, b in pairs), 3),
            "drafted": round((totals.drafted_tokens - drafted) / tokens, 2),
            "accepted": round((totals.accepted_tokens - accepted) / tokens, 2),
            "same": all(a.tokens == b.tokens for a, b in pairs),
        }

    def _counted(
        self, prompts: list[list[int]], sampling: SamplingParams, known: list[list[int]]
    ) -> dict[str, Any]:
        """What drafts save of these answers by count."""
        count = partial(
            counted, prompts, known, self._tokenizer, self._facts.vocabulary_size, sampling=sampling
        )
        plain = count(None)
        if (runner := self._draft_runner) is None:
            drafting = count(make_drafter(self._config))
            return {
                "counted": round(plain.seconds / drafting.seconds, 3),
                "tokens_a_step": round(plain.rows / drafting.steps, 2),
                "rows_a_step": round(drafting.rows / drafting.steps, 2),
            }
        found = {}
        for cost in self._costs:
            clock = VirtualTime()
            drafter = DraftModel(CostingRunner(runner, clock, cost), self._facts.vocabulary_size, clock=clock)
            drafter.warm_up(min(MAX_SEQUENCES, len(prompts)))
            drafting = count(drafter, clock, runner.num_blocks)
            found[f"counted at {cost:g}"] = round(plain.seconds / drafting.seconds, 3)
            found[f"tokens a step at {cost:g}"] = round(plain.rows / drafting.steps, 2)
        return found


def chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a conversation that begins with this text."""
    return tokenizer.render_chat([Turn("user", text)])


def numbered(texts: list[str], count: int) -> list[str]:
    """So many texts: these, each with a number, so that no two are the same."""
    return [f"{number}. {texts[number % len(texts)]}" for number in range(count)]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.speculation", description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=positive_whole, default=1)
    parser.add_argument("--turns", type=positive_whole, default=5)
    parser.add_argument("--tokens", type=positive_whole, default=200, help="of each answer, at most")
    parser.add_argument("--prompts", nargs="*", default=[*COPY, *FREE, *BATCHES], help="only these")
    parser.add_argument(
        "--without-layers", type=positive_whole, nargs="+", help="of the draft model; else prompt lookup"
    )
    parser.add_argument(
        "--draft-costs", type=positive_number, nargs="+", default=[0.05, 0.1, 0.2], help="to count with"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    torch.set_num_threads(options.threads)
    machine = this_machine()
    with TemporaryDirectory() as folder:
        draft_model = None
        if options.without_layers:
            own = Path(resolve_model(MODEL).path)
            draft_model = without_layers(own, Path(folder) / "draft", options.without_layers)
        bench = Bench(options.dtype, options.threads, draft_model, options.draft_costs)
    greedy = SamplingParams(temperature=0.0)
    cases = [
        (kind, name, [text], sampling)
        for kind, texts in (("copy", COPY), ("free", FREE))
        for name, text in texts.items()
        for sampling in (greedy, SAMPLED)
    ]
    copies, free = [*COPY.values(), REPORT], list(FREE.values())
    cases += [
        ("copy", "several", copies, greedy),
        ("free", "several", free, greedy),
        ("free", "several", free, SAMPLED),
        ("mixed", "several", [*copies[:2], *free[:2]], greedy),
        *((kind, "eight", numbered(texts, 8), greedy) for kind, texts in (("copy", copies), ("free", free))),
        *((kind, "many", numbered(texts, 32), greedy) for kind, texts in (("copy", copies), ("free", free))),
    ]
    cases = [case for case in cases if case[1] in options.prompts]
    rows = [bench.row(*case, options.turns, options.tokens) for case in cases]
    show("speculation", sys.argv[1:], machine, rows, as_json=options.json)


if __name__ == "__main__":
    main()
