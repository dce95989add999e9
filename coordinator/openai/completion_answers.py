"""Answers of `/v1/completions`: one choice, streamed or sent at once."""

from __future__ import annotations

from typing import Any

from coordinator.openai.answers import FINISH_REASONS, ChunkFrame, Frame, quoted
from coordinator.openai.logprobs import CompletionLogprobs, TokenTexts
from splitserve.v1 import generation_pb2, inference_pb2


class CompletionChunks:
    """See ChoiceStream. `echo` is sent before anything else; `texts` when log-probabilities were asked for."""

    def __init__(
        self, frame: Frame, index: int, *, has_usage: bool, echo: str = "", texts: TokenTexts | None = None
    ) -> None:
        self._frame = ChunkFrame(frame, index, has_usage)
        self._before = f'{self._frame.before}"text":'
        self._after = f',"logprobs":null,"finish_reason":null{self._frame.after}'
        self._echo = echo
        self._logprobs = CompletionLogprobs(texts) if texts else None
        self._ended = False

    def delta(self, delta: generation_pb2.OutputDelta) -> bytes:
        """See ChoiceStream."""
        events, text = "", delta.text
        if self._echo:
            events, self._echo = self._chunk(self._echo), ""
        if self._logprobs is not None and delta.logprobs:
            events += self._chunk(text, self._logprobs.shown(delta.logprobs))
        elif text:
            events += f"{self._before}{quoted(text)}{self._after}"
        if delta.finish_reason:
            events += self._end(delta.finish_reason)
        return events.encode()

    def done(self, done: inference_pb2.GenerationDone) -> bytes:
        """See ChoiceStream."""
        return b"" if self._ended else self._end(done.finish_reason).encode()

    def _end(self, reason: int) -> str:
        self._ended = True
        return self._chunk("", finish_reason=FINISH_REASONS[reason])

    def _chunk(
        self, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> str:
        return self._frame.chunk({"text": text, "logprobs": logprobs, "finish_reason": finish_reason})


class CompletionBody:
    """See ChoiceBody. `echo` begins the text; `texts` when log-probabilities were asked for."""

    def __init__(self, index: int, *, echo: str = "", texts: TokenTexts | None = None) -> None:
        self._index, self._texts = index, texts
        self._pieces = [echo]
        self._logprobs: list[generation_pb2.TokenLogprob] = []

    def delta(self, delta: generation_pb2.OutputDelta) -> None:
        """See ChoiceBody."""
        self._pieces.append(delta.text)
        if self._texts is not None:
            self._logprobs.extend(delta.logprobs)

    def shown(self, done: inference_pb2.GenerationDone) -> dict[str, Any]:
        """See ChoiceBody."""
        return {
            "index": self._index,
            "text": "".join(self._pieces),
            "logprobs": CompletionLogprobs(self._texts).shown(self._logprobs) if self._texts else None,
            "finish_reason": FINISH_REASONS[done.finish_reason],
        }
