"""The taker's end of one pull: takes pieces out of its window, checks them, and grants the blocks again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kv_transfer.transports.transport import TransferEndpoint, Transport
from kv_transfer.weights.manifest import (
    PLAIN,
    Manifest,
    TensorSpec,
    WeightsForm,
    WeightsPiece,
    pieces,
)
from kv_transfer.weights.window import PieceWindow
from kv_transfer.weights.written import WrittenPiece
from splitserve.errors import DeadlineExceededError, TransferError

PIECE_BYTES = 2**22
WINDOW_BLOCKS = 8
PIECE_S = 20.0
"""Longest time in seconds without a piece."""
_POLL_S = 0.0002

Destination = npt.NDArray[np.uint8]
"""The bytes of one tensor, where the taker keeps it."""


class PullCall(Protocol):
    """The call to the giver. Each method raises the SplitserveError of a call that has failed or ended."""

    def open(self, window: TransferEndpoint) -> Manifest:
        """Names the window; what is given."""
        ...

    def grant(self, blocks: Sequence[int]) -> None:
        """Lets the giver write into these blocks of the window. Does not wait."""

    def check(self) -> None:
        """Raises if the call has ended. Does not wait."""

    def finish(self) -> None:
        """Ends the call, and waits until the giver has closed its transport."""


class WeightsSource(Protocol):
    """Where weights come from, if not from files."""

    def fetch(
        self, specs: Sequence[TensorSpec], allocate: Callable[[TensorSpec], Destination], form: WeightsForm
    ) -> Manifest:
        """Fills what `allocate` returns for each of exactly these tensors, of weights of this form; what the giver said
        of them, whose fingerprints the model must have.

        Raises SplitserveError for any fault; what was filled until then is worth nothing.
        """
        ...


class WeightsTaker:
    """One pull. Used on one thread."""

    def __init__(
        self,
        call: PullCall,
        open_transport: Callable[[], Transport],
        *,
        piece_bytes: int = PIECE_BYTES,
        window_blocks: int = WINDOW_BLOCKS,
        piece_s: float = PIECE_S,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._call, self._open_transport = call, open_transport
        self._piece_bytes, self._window_blocks, self._piece_s = piece_bytes, window_blocks, piece_s
        self._clock, self._wait = clock, wait

    def take(
        self,
        specs: Sequence[TensorSpec],
        allocate: Callable[[TensorSpec], Destination],
        form: WeightsForm = PLAIN,
    ) -> Manifest:
        """See `WeightsSource.fetch`. Nothing is allocated before the giver's list is `specs`."""
        window = PieceWindow(self._window_blocks, self._piece_bytes)
        transport = self._open_transport()
        at_rest = True  # nothing is written before a block is granted
        try:
            manifest = self._call.open(transport.register_memory(window.memory))
            manifest.require_same(specs, form)
            at_rest = False
            self._receive(manifest, allocate, window, transport)
            self._call.finish()
            at_rest = True
            return manifest
        finally:
            try:
                transport.close()
            except BaseException:
                at_rest = False
                raise
            finally:
                if not at_rest:
                    window.abandon()

    def _receive(
        self,
        manifest: Manifest,
        allocate: Callable[[TensorSpec], Destination],
        window: PieceWindow,
        transport: Transport,
    ) -> None:
        arriving = self._arriving(transport, manifest.agent_id)
        wanted = list(pieces(manifest.specs, self._piece_bytes))
        for spec in manifest.specs:
            if not spec.num_bytes:
                allocate(spec)
        granted = list(range(min(self._window_blocks, len(wanted))))
        if granted:
            self._call.grant(granted)
        into: Destination | None = None
        for number, piece in enumerate(wanted):
            written = next(arriving)
            if piece.start == 0:
                into = allocate(piece.spec)
            assert into is not None
            _require_piece(written, number, piece, granted[0])
            block = granted.pop(0)
            kept = into[piece.start : piece.start + piece.size]
            kept[:] = window.block(block)[: piece.size]
            # Of what is kept: whatever is written into the window meanwhile, it is this that has to be right.
            if xxhash.xxh3_64_intdigest(kept.data) != written.checksum:
                message = f"weights of a peer: {piece.spec.name!r} differs from what was sent"
                raise TransferError(message, reason="WEIGHTS_CHECKSUM")
            if number + len(granted) + 1 < len(wanted):
                granted.append(block)
                self._call.grant([block])

    def _arriving(self, transport: Transport, agent_id: str) -> Iterator[WrittenPiece]:
        """What the giver has written, in order. Raises the call's error, or DeadlineExceededError (WEIGHTS_STALLED)."""
        ends_s = self._clock() + self._piece_s
        while True:
            for sender, message in transport.poll().notifications:
                if sender == agent_id:
                    yield WrittenPiece.unpack(message)
                    ends_s = self._clock() + self._piece_s
            self._call.check()
            if self._clock() > ends_s:
                message_s = f"no piece of the weights for {self._piece_s:g} s"
                raise DeadlineExceededError(message_s, reason="WEIGHTS_STALLED")
            self._wait(_POLL_S)


def _require_piece(written: WrittenPiece, number: int, piece: WeightsPiece, block: int) -> None:
    """Raises TransferError (WEIGHTS_MALFORMED) unless it is the piece that follows, in the block that was granted."""
    if (written.number, written.block, written.count) != (number, block, piece.size):
        message = (
            f"weights of a peer: piece {number} is due in block {block} with {piece.size} bytes, not piece "
            f"{written.number} in block {written.block} with {written.count}"
        )
        raise TransferError(message, reason="WEIGHTS_MALFORMED")
