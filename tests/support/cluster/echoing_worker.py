"""`splitserve ARGUMENTS` with a simulated model that says what the first user says: `python -m` this with ARGUMENTS.

So a test gives it any recorded text to say, in the tokens of a real tokenizer (`recorded_model.py`). With a grammar, it
says the text as long as the grammar allows that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from engine.core.model_runner import SampledToken, ScheduledSequence
from engine.runner.simulated_runner import SimulatedRunner
from engine.runner.structured_output import Mask, allowed_tokens
from launcher.cli.main import main
from splitserve.config.worker import WorkerConfig
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.tokenizer import Tokenizer
from worker import build


class EchoingRunner(SimulatedRunner):
    """Computes as the simulated model does, and samples the next token of the message."""

    def __init__(self, config: WorkerConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config.engine)
        names = json.loads(Path(config.model, "tokenizer_config.json").read_text())
        self._turn, self._eos = (tokenizer.encode(names[name])[0] for name in ("bos_token", "eos_token"))
        self._size, self._first_tag = tokenizer.vocabulary_size, min(self._turn, self._eos)
        self.facts = replace(self.facts, vocabulary_size=self._size, eos_token_ids=frozenset({self._eos}))

    @override
    def _compute(self, sequence: ScheduledSequence, mask: Mask | None) -> SampledToken | None:
        sampled = super()._compute(sequence, None)
        if sampled is None or self._turn not in sequence.token_ids:  # a warm-up has no message
            return sampled
        token = self._next(sequence.token_ids)
        if mask is None:
            return SampledToken(token)
        allowed = allowed_tokens(mask, self._size, sequence.banned_token_ids).nonzero()[0]
        if token not in allowed:
            # As models do, it ends where it may, and writes a tag as one token.
            tags = allowed[allowed >= self._first_tag]
            choices = tags if len(tags) else allowed
            token = self._eos if self._eos in allowed else int(choices[sampled.token_id % len(choices)])
        return SampledToken(token)

    @override
    def _decode(self, batch: list[ScheduledSequence]) -> list[SampledToken]:
        sampled = (self._compute(sequence, None) for sequence in batch)
        return [token for token in sampled if token is not None]

    def _next(self, said: Sequence[int]) -> int:
        """What comes after the prompt and what was said: the first turn again, from its first token on."""
        begin = said.index(self._turn) + 1
        message = said[begin : said.index(self._turn, begin)]
        place = list(reversed(said)).index(self._turn)
        return message[place] if place < len(message) else self._eos


def load(config: WorkerConfig, clock: Any) -> Any:
    clock.imported()
    tokenizer = load_tokenizer(config.model)
    return EchoingRunner(config, tokenizer), build.ServedAs("simulated", config.model), tokenizer


if __name__ == "__main__":
    build._simulated = load
    sys.exit(main(sys.argv[1:]))
