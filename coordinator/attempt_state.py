"""The state machine of an attempt: states, events and transitions; and how many attempts there may be. Pure.

The first token comes from the prefill worker and everything after it from the decode worker, on independent streams.
Decode output may therefore arrive before the first token (OVERTAKEN), or before the transfer report (DECODING).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from splitserve.errors import SplitserveError


class AttemptState(enum.StrEnum):
    """Progress of an attempt."""

    NEW = "new"
    """No worker has been called."""
    RESERVING = "reserving"
    """Reserve was called on the decode worker."""
    REFUSED = "refused"
    """The decode worker refused; it holds nothing for the attempt."""
    RESERVED = "reserved"
    """The decode worker returned a ticket."""
    LOCAL = "local"
    """The decode worker computes the prompt itself; all output comes from it."""
    PREFILLING = "prefilling"
    """Prefill was called; no first token yet."""
    OVERTAKEN = "overtaken"
    """The decode worker has the KV; the first token has not arrived yet."""
    TRANSFERRING = "transferring"
    """The first token has arrived; the KV is being transferred if there is a decode worker."""
    WRITTEN = "written"
    """The prefill worker has reported the last write; nothing from the decode worker yet."""
    DECODING = "decoding"
    """The decode worker has the KV; the transfer report is outstanding."""
    REPORTED = "reported"
    """The decode worker has the KV, and the prefill worker is done."""
    ENDED_AT_PREFILL = "ended at prefill"
    """The first token was also the last."""
    SETTLING = "settling"
    """The decode worker's last output was taken; the transfer report is outstanding."""
    FINISHED = "finished"
    """The decode worker's last output was taken; nothing is outstanding."""
    FAILED = "failed"
    """A worker failed the attempt, or was lost."""


class AttemptEvent(enum.StrEnum):
    """Inputs of the state machine."""

    ASK_DECODE = "ask decode"
    REFUSAL = "refusal"
    TICKET = "ticket"
    COMPUTES_LOCALLY = "computes locally"
    ASK_PREFILL = "ask prefill"
    FIRST_TOKEN = "first token"
    PREFILL_OVER = "prefill over"
    """The transfer report arrived, or the prefill worker failed when it was no longer needed."""
    DECODE_HAS_KV = "decode has kv"
    """The decode worker's first message: admission of the KV, or output."""
    LAST_TOKEN = "last token"
    """The first token was taken, and it ends the answer."""
    LAST_OUTPUT = "last output"
    """The decode worker's last output was taken."""
    FAILURE = "failure"


_S, _E = AttemptState, AttemptEvent
IN_FLIGHT = frozenset(
    {_S.LOCAL, _S.PREFILLING, _S.OVERTAKEN, _S.TRANSFERRING, _S.WRITTEN, _S.DECODING, _S.REPORTED}
)
"""States in which output is still expected, and in which a failure is possible."""

AWAITS_FIRST_TOKEN = frozenset({_S.PREFILLING, _S.OVERTAKEN})
"""States in which no output can be sent yet."""
AWAITS_DECODE = frozenset({_S.PREFILLING, _S.TRANSFERRING, _S.WRITTEN})
"""States in which the decode worker's first message tells that it has the KV."""
ONLY_DECODE_SENDS = frozenset({_S.LOCAL, _S.DECODING, _S.REPORTED})
"""States that output of the decode worker does not change, unless it is the last."""
AWAITS_REPORT = frozenset({_S.DECODING, _S.SETTLING})
"""States in which nothing but the transfer report is expected of the prefill worker."""
ENDED = frozenset({_S.ENDED_AT_PREFILL, _S.SETTLING, _S.FINISHED})
"""The last output was taken."""
PREFILL_NOT_NEEDED = ENDED | {_S.LOCAL, _S.WRITTEN, _S.DECODING, _S.REPORTED}
"""The first token has arrived and the KV is known to be on the decode worker, or prefill was never called."""
_DECODE_HOLDS_NOTHING = frozenset({_S.NEW, _S.REFUSED, _S.SETTLING, _S.FINISHED})

TRANSITIONS: Mapping[tuple[AttemptState, AttemptEvent], AttemptState] = MappingProxyType(
    {
        (_S.NEW, _E.ASK_DECODE): _S.RESERVING,
        (_S.NEW, _E.ASK_PREFILL): _S.PREFILLING,
        (_S.RESERVING, _E.REFUSAL): _S.REFUSED,
        (_S.RESERVING, _E.TICKET): _S.RESERVED,
        (_S.RESERVING, _E.COMPUTES_LOCALLY): _S.LOCAL,
        (_S.RESERVED, _E.ASK_PREFILL): _S.PREFILLING,
        (_S.PREFILLING, _E.FIRST_TOKEN): _S.TRANSFERRING,
        (_S.PREFILLING, _E.DECODE_HAS_KV): _S.OVERTAKEN,
        (_S.OVERTAKEN, _E.FIRST_TOKEN): _S.DECODING,
        (_S.TRANSFERRING, _E.PREFILL_OVER): _S.WRITTEN,
        (_S.TRANSFERRING, _E.DECODE_HAS_KV): _S.DECODING,
        (_S.WRITTEN, _E.DECODE_HAS_KV): _S.REPORTED,
        (_S.DECODING, _E.PREFILL_OVER): _S.REPORTED,
        (_S.TRANSFERRING, _E.LAST_TOKEN): _S.ENDED_AT_PREFILL,
        (_S.WRITTEN, _E.LAST_TOKEN): _S.ENDED_AT_PREFILL,
        (_S.DECODING, _E.LAST_TOKEN): _S.ENDED_AT_PREFILL,
        (_S.REPORTED, _E.LAST_TOKEN): _S.ENDED_AT_PREFILL,
        (_S.DECODING, _E.LAST_OUTPUT): _S.SETTLING,
        (_S.REPORTED, _E.LAST_OUTPUT): _S.FINISHED,
        (_S.LOCAL, _E.LAST_OUTPUT): _S.FINISHED,
        (_S.SETTLING, _E.PREFILL_OVER): _S.FINISHED,
        **{(state, _E.FAILURE): _S.FAILED for state in IN_FLIGHT},
    }
)

MAX_FRUITLESS_ATTEMPTS = 3
"""Attempts of one request that may fail in a row without a token. A long answer may lose a worker as often as it makes
progress in between; only its deadline bounds the attempts in sum."""


MOVED = "WORKER_PREEMPTED"
"""Reason with which an attempt fails that leaves a worker whose machine is taken away; see `coordinator.spot`."""


def fruitless_attempts(before: int, tokens: int, reason: str = "") -> int:
    """Failed attempts in a row without a token, after `before` of them and one more that brought `tokens` and failed
    for `reason`. One that was moved did not fail by itself."""
    return 0 if tokens else before + (reason != MOVED)


def after(state: AttemptState, event: AttemptEvent) -> AttemptState:
    """The state that follows on an event. Raises SplitserveError (ILLEGAL_TRANSITION) for an event out of place."""
    next_state = TRANSITIONS.get((state, event))
    if next_state is None:
        message = f"an attempt that is {state.value} cannot take the event {event.value!r}"
        raise SplitserveError(message, reason="ILLEGAL_TRANSITION")
    return next_state


class DecodeRelease(enum.Enum):
    """What the decode worker must be told when an attempt is closed."""

    NOTHING = "nothing"
    """It holds nothing for the attempt."""
    WITH_WRITER = "with writer"
    """A prefill worker may write: quarantine the blocks."""
    NO_WRITER = "no writer"
    """The ticket was never handed out, or its last write was reported: nobody writes."""


def release_of(state: AttemptState, *, prefill_called: bool, written: bool) -> DecodeRelease:
    """What to tell the decode worker of an attempt that is closed in `state`.

    `prefill_called`: the ticket has left for a prefill worker. `written`: the transfer report has arrived.
    """
    if state in _DECODE_HOLDS_NOTHING:
        return DecodeRelease.NOTHING
    return DecodeRelease.WITH_WRITER if prefill_called and not written else DecodeRelease.NO_WRITER
