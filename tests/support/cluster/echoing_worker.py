"""`splitserve ARGUMENTS` with a simulated model that says what the last message says: `python -m` this with ARGUMENTS.

So a test gives it any recorded text to say. With a grammar, it says the text as long as the grammar allows that.
"""

from __future__ import annotations

import sys

from typing_extensions import override

from engine.core.model_runner import SampledToken, ScheduledSequence
from engine.runner.simulated_runner import EOS_TOKEN_ID, VOCABULARY_SIZE, SimulatedRunner
from engine.runner.structured_output import Mask, allowed_tokens
from launcher.cli.main import main
from worker import build

MESSAGE, ANSWER = b"user: ", b"\nassistant: "


class EchoingRunner(SimulatedRunner):
    """Computes as the simulated model does, and samples the next byte of the message."""

    @override
    def _compute(self, sequence: ScheduledSequence, mask: Mask | None) -> SampledToken | None:
        sampled = super()._compute(sequence, mask)
        text = bytes(token for token in sequence.token_ids if token < EOS_TOKEN_ID)
        if sampled is None or ANSWER not in text:  # a warm-up has no message
            return sampled
        token = next_byte(text)
        if mask is not None and token not in allowed_tokens_of(mask, sequence):
            return sampled
        return SampledToken(token)


def next_byte(said: bytes) -> int:
    """What comes after the prompt and what was said."""
    begin = said.index(MESSAGE) + len(MESSAGE)
    end = said.index(ANSWER, begin)
    place = begin + len(said) - (end + len(ANSWER))
    return said[place] if place < end else EOS_TOKEN_ID


def allowed_tokens_of(mask: Mask, sequence: ScheduledSequence) -> set[int]:
    return {
        int(token) for token in allowed_tokens(mask, VOCABULARY_SIZE, sequence.banned_token_ids).nonzero()[0]
    }


if __name__ == "__main__":
    build.SimulatedRunner = EchoingRunner  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
