"""Measures a few decode steps before the first request, so that the first report has a fit of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.core.model_runner import ModelRunner, made_up
from engine.core.types import RowsFailedError
from engine.pacing.lent_effect import speedup_of
from engine.pacing.step_time_fit import StepTimeFit
from splitserve.generation.kv_blocks import blocks_for
from splitserve.logs import log_event

STREAMS = (1, 4)
"""Batches that are measured: two, so that a stream gets a price of its own."""
STEPS = 4
"""Measured steps of each batch. One more before them counts for nothing: it compiles or captures."""
LIMIT_S = 0.25
"""No step begins later than this after the first."""


def measure_decode_steps(
    runner: ModelRunner,
    fit: StepTimeFit,
    prompt_tokens: int,
    max_streams: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Records decode steps in `fit`, of up to `max_streams` streams, and fits them.

    All streams stand at the end of the one prompt that `warm_up` has computed, of `prompt_tokens`, in its blocks: each
    writes there what is there already. Contexts are short, so the fit has no price of their tokens yet; steps of
    requests bring it, and displace what is measured here. A device too slow for it gets no fit, as without it.
    """
    if prompt_tokens < 1:
        return
    blocks = range(blocks_for(prompt_tokens, runner.layout.block_size_tokens))
    began_s, measured = clock(), 0
    try:
        for streams in sorted({min(streams, max_streams) for streams in STREAMS}):
            batch = [made_up(runner, prompt_tokens - 1, 1, blocks, row) for row in range(streams)]
            taken_s = []
            for step in range(1 + STEPS):
                step_s = clock()
                if step_s - began_s >= LIMIT_S:
                    break
                runner.execute(batch)
                if step:
                    taken_s.append((clock() - step_s) * speedup_of(runner.speedup))
            if taken_s:
                # The fastest: what else starts on this host meanwhile only adds, and a batch that is taken for too slow
                # is not admitted, and so not measured again.
                fit.record(streams, streams * prompt_tokens, min(taken_s))
                measured += 1
    except RowsFailedError as error:
        # As in `warm_up`: the model may fail on this prompt and still work on others.
        log_event("worker.warm_up_failed", error=error.message)
    runner.rest()
    if measured:
        fit.refit()
