"""Finds stop strings in text that arrives in pieces, without ever emitting part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back text that may turn out to begin a stop string.

    The result does not depend on how the text is cut into pieces: the match that is complete first wins;
    of several complete at the same character, the longest.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stop_strings if stop)
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Takes new text; returns what may be emitted and whether a stop string ended the answer.

        Without `may_stop`, stop strings that are completed by this piece are ordinary text.
        """
        if not self._stops:
            return text, False
        seen, buffer = len(self._held), self._held + text
        if may_stop:
            match = self._first_match(buffer, seen)
            if match is not None:
                self._held = ""
                return buffer[:match], True
        keep = self._possible_start(buffer)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def release(self) -> str:
        """The text held back, when the answer ends otherwise."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, seen: int) -> int | None:
        # A match that ends within the `seen` characters was passed over on purpose (`may_stop`).
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _possible_start(self, buffer: str) -> int:
        """Where the longest end of `buffer` begins that is the beginning of a stop string."""
        best = len(buffer)
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1), best)
            while start != -1:
                if stop.startswith(buffer[start:]):
                    best = start
                    break
                start = buffer.find(stop[0], start + 1, best)
        return best
