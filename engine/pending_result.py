"""What a step produced, between its end and its handing out.

Most texts decide nothing: they are written only when the result is taken, which may be while the next step is computed.
"""

from __future__ import annotations

from engine.sequence import Sequence
from engine.types import FinishReason, RequestOutput, StepResult
from splitserve.tokenizer import Tokenizer


class PendingResult:
    """At most one result. Used on the engine thread."""

    def __init__(self, tokenizer: Tokenizer, *, late: bool) -> None:
        self.late = late
        """Whether texts that cannot end their answers are left for `take`."""
        self._tokenizer = tokenizer
        self._result: StepResult | None = None
        self._texts: list[tuple[Sequence, RequestOutput, bool]] = []

    def write(self, sequence: Sequence, output: RequestOutput, shows: bool) -> None:
        """Adds the text of an output's token; `shows` tells whether that has any. A stop string ends the answer."""
        text = sequence.text(self._tokenizer)
        if shows:
            output.text, stopped = text.push(output.token_ids[0])
            if stopped:
                output.finish_reason = FinishReason.STOP
        if output.finish_reason is not None:
            output.text += text.flush()  # nothing after a stop string

    def write_late(self, sequence: Sequence, output: RequestOutput, shows: bool) -> None:
        """Does the same in `take`."""
        self._texts.append((sequence, output, shows))

    def put(self, result: StepResult) -> None:
        """The step is over."""
        if self._result is not None:
            raise AssertionError("the former step's result has not been taken")
        self._result = result

    @property
    def can_wait(self) -> bool:
        """Whether the result is for clients only. KV goes out at once: a peer waits for it, and packing or checking it
        would queue behind the next step on the device."""
        return self._result is not None and not self._result.progress

    def take(self) -> StepResult | None:
        """The result, with all its texts; None if there is none. It is the caller's from now on."""
        for piece in self._texts:
            self.write(*piece)
        self._texts.clear()
        result, self._result = self._result, None
        return result

    def holds(self, request_id: str) -> bool:
        """Whether there is an output of this request."""
        return self._result is not None and any(o.request_id == request_id for o in self._result.outputs)

    def drop(self, request_id: str) -> bool:
        """Nobody is to hear of this request any more; whether there was an output of it."""
        if self._result is None or not self._result.drop(request_id):
            return False
        self._texts = [piece for piece in self._texts if piece[1].request_id != request_id]
        return True
