"""Host memory through which weights pass, at either end of a pull."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from kv_transfer.transports.transport import KvMemoryRegion
from kv_transfer.weights.manifest import window_layout

_abandoned: list[PieceWindow] = []
"""Windows that a peer may still write to. Their pages are given back, their addresses are never used again."""


class PieceWindow:
    """`num_blocks` blocks of `piece_bytes`, an anonymous mapping of its own, private: a shared one keeps its pages.

    Weights never lie here: pieces are copied out. So what a peer writes late, or twice, reaches no weight.
    """

    def __init__(self, num_blocks: int, piece_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, num_blocks * piece_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8).reshape(
            num_blocks, piece_bytes
        )

    @property
    def memory(self) -> KvMemoryRegion:
        """The region to register."""
        count, piece_bytes = self._bytes.shape
        return KvMemoryRegion(self._bytes.ctypes.data, count, window_layout(piece_bytes))

    def block(self, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of one block, a view."""
        view: npt.NDArray[np.uint8] = self._bytes[index]
        return view

    def abandon(self) -> None:
        """A peer may still write here, and nobody can know until when: a write by address would hit whatever has the
        addresses then. So they stay taken while the process lives; only pages that are written late cost memory."""
        self._mapping.madvise(mmap.MADV_DONTNEED)
        _abandoned.append(self)
