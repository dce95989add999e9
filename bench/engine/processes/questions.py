"""Protocol of engine processes: questions and answers, one JSON object per line.

Imports the standard library only, because peers run it in their own environments. A question is
`{"phase": "decode" | "prefill", "batch": n, "context": tokens, "steps": n}`, the answer `{"step_s": [...]}`: for decode
the time of each step in which all `batch` sequences got a token, once all prompts of `context` tokens are computed (the
first sequence is then some tokens further than the last); for prefill that of each of `steps` whole prompts of
`context` tokens, first token included. Our own engine also gives `outside_s`, the part of a decode step outside the
model, and answers `{"phase": "limits"}` with what the machine gives.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

Answer = dict[str, Any]
Question = dict[str, Any]

WARM_UP_STEPS = 2
SPARE_STEPS = 4
"""Steps after the warm-up that may miss a sequence and are not timed, at most."""
LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 40_000


def decode_steps(step: Callable[[], Collection[str]], names: Collection[str], steps: int) -> Iterator[float]:
    """Yields the seconds of `steps` steps in which all sequences decode, right after each.

    `step` makes one step and returns who got tokens. Steps before all have a first token, in which prompts are still
    computed, are not timed, nor are `WARM_UP_STEPS` after them. Raises RuntimeError when sequences miss steps later.
    """
    everyone, waiting, timed = set(names), set(names), 0
    while waiting:
        waiting -= set(step())
    for number in range(WARM_UP_STEPS + steps + SPARE_STEPS):
        began = time.perf_counter()
        got = set(step())
        took = time.perf_counter() - began
        if number >= WARM_UP_STEPS and got == everyone:
            yield took
            timed += 1
            if timed == steps:
                return
    raise RuntimeError(
        f"all {len(everyone)} sequences got a token in {timed} steps only; {steps} were asked for"
    )


def decode_tokens(batch: int, context: int, steps: int, prompt_tokens_a_step: int) -> int:
    """Most output tokens of a sequence in `decode_steps`: the first one decodes while all others are prefilled.

    `prompt_tokens_a_step` is what a step computes of a prompt at least, if it is not the prompt's last chunk.
    """
    steps_per_prompt = -(-context // prompt_tokens_a_step)
    return batch * steps_per_prompt + WARM_UP_STEPS + steps + SPARE_STEPS


def serve(start: Callable[[], Callable[[Question], Answer]]) -> None:
    """Starts an engine and answers until end of input. Output of libraries goes to stderr, not between answers."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    answer = start()
    out.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
