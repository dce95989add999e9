"""The giver's end of one pull: reads pieces of its weights and writes them into the taker's window."""

from __future__ import annotations

import time
from collections.abc import Callable

import xxhash

from kv_transfer.transports.transport import DRAM, TransferEndpoint, Transport
from kv_transfer.weights.manifest import (
    MAX_PIECE_BYTES,
    MAX_WINDOW_BLOCKS,
    MIN_PIECE_BYTES,
    Manifest,
    WeightsPiece,
    WeightsReader,
    pieces,
    window_layout,
)
from kv_transfer.weights.window import PieceWindow
from kv_transfer.weights.written import WrittenPiece
from splitserve.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    TransferError,
)

WRITE_S = 10.0
"""Longest time in seconds of one write."""
_POLL_S = 0.0002


class WeightsGiver:
    """Writes one piece at a time. Used on one thread.

    The weights themselves are not registered with the transport: each piece is copied into memory of this pull's own,
    so no peer could write to them, or read what it was not sent.
    """

    def __init__(
        self, reader: WeightsReader, open_transport: Callable[[], Transport], taker: TransferEndpoint
    ) -> None:
        """Opens nothing yet. Raises InvalidArgumentError naming field and bound of a window that no taker has."""
        check_window(taker)
        self._reader, self._open_transport = reader, open_transport
        piece_bytes = taker.memory.layout.block_bytes
        self._pieces = pieces(reader.specs, piece_bytes)
        self._number = 0
        self._taker = taker
        self._window = PieceWindow(1, piece_bytes)
        self._transport: Transport | None = None

    def open(self) -> Manifest:
        """Connects to the taker's window; what is given. Close the giver also where this fails.

        Raises FailedPreconditionError for another transport or layout, TransferError for a taker out of reach.
        """
        self._transport = self._open_transport()
        endpoint = self._transport.register_memory(self._window.memory)
        self._transport.connect(self._taker)
        given = self._reader
        specs = tuple(given.specs)
        return Manifest(given.fingerprint, endpoint.agent_id, specs, given.form, given.content)

    def write(self, block: int) -> int:
        """Writes the next piece into a block of the window, and waits until it is there; its bytes.

        Raises InvalidArgumentError for a block that is none, FailedPreconditionError once all pieces are written,
        TransferError for a failed write, DeadlineExceededError (WEIGHTS_STALLED) for one that does not end.
        """
        assert self._transport is not None
        if not 0 <= block < self._taker.memory.num_blocks:
            message = f"blocks must be 0..{self._taker.memory.num_blocks - 1}, not {block}"
            raise InvalidArgumentError(message, field="blocks")
        piece = next(self._pieces, None)
        if piece is None:
            raise FailedPreconditionError(
                "all weights are sent, and a block is granted for more", reason="NO_MORE_WEIGHTS"
            )
        written = self._staged(piece, block)
        handle = self._transport.write(self._taker.agent_id, [0], [block], written.pack())
        _wait(self._transport, handle)
        self._number += 1
        return piece.size

    def close(self) -> None:
        """Closes the transport; nothing is written from then on. Idempotent."""
        self._reader.rest()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _staged(self, piece: WeightsPiece, block: int) -> WrittenPiece:
        view = self._reader.read(*piece)
        checksum = xxhash.xxh3_64_intdigest(view)
        self._window.block(0)[: piece.size] = view
        return WrittenPiece(self._number, block, piece.size, checksum)


def _wait(transport: Transport, handle: int) -> None:
    ends_s = time.monotonic() + WRITE_S
    while True:
        for result in transport.poll().writes:
            if result.handle == handle:
                if result.error is not None:
                    raise TransferError(f"weights: {result.error}")
                return
        if time.monotonic() > ends_s:
            message = f"a write of weights has not ended after {WRITE_S:g} s"
            raise DeadlineExceededError(message, reason="WEIGHTS_STALLED")
        time.sleep(_POLL_S)


def check_window(taker: TransferEndpoint) -> None:
    """Raises InvalidArgumentError, naming field and bound, for a window that no taker has."""
    memory = taker.memory
    if memory.memory_kind != DRAM:
        raise InvalidArgumentError("window.memory_kind must be DRAM", field="window.memory_kind")
    if not 1 <= memory.num_blocks <= MAX_WINDOW_BLOCKS:
        message = f"window.num_blocks must be 1..{MAX_WINDOW_BLOCKS}"
        raise InvalidArgumentError(message, field="window.num_blocks")
    # Not of the layout as it is sent: its products may have any size.
    if not MIN_PIECE_BYTES // 2 <= memory.layout.head_dim <= MAX_PIECE_BYTES // 2:
        message = f"window.layout.head_dim must be {MIN_PIECE_BYTES // 2}..{MAX_PIECE_BYTES // 2}"
        raise InvalidArgumentError(message, field="window.layout.head_dim")
    if memory.layout != window_layout(2 * memory.layout.head_dim) or memory.layer_stride:
        message = "window.layout must be that of a window for weights"
        raise InvalidArgumentError(message, field="window.layout")
