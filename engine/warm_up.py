"""The first steps, before anybody waits for them: kernels are chosen, memory is touched, pages are there."""

from __future__ import annotations

from engine.runner import ModelRunner, RowsFailedError, ScheduledSequence
from engine.types import SamplingParams
from splitserve.logs import log_event

PROMPT_TOKENS = 64


def warm_up(runner: ModelRunner, max_step_tokens: int | None) -> None:
    """Computes a short prompt and one token more, in blocks that nobody owns yet."""
    size = runner.layout.block_size_tokens
    room = min(max_step_tokens or PROMPT_TOKENS + 1, runner.num_blocks * size, runner.facts.context_tokens)
    prompt = min(PROMPT_TOKENS, room - 1)
    if prompt < 1:
        return
    blocks = range(-(-(prompt + 1) // size))
    try:
        for computed, new in ((0, prompt), (prompt, 1)):
            sequence = ScheduledSequence(
                request_id="warm-up",
                token_ids=[at % runner.facts.vocabulary_size for at in range(computed + new)],
                prompt_tokens=prompt,
                num_computed=computed,
                num_new=new,
                block_ids=list(blocks),
                sample=True,
                sampling=SamplingParams(temperature=0.0),
            )
            runner.execute([sequence])
    except RowsFailedError as error:
        # A model that dislikes this prompt may like others; what matters has run.
        log_event("worker.warm_up_failed", error=error.message)
