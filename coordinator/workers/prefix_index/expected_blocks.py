"""Blocks that prompts in flight will fill, so that equal prompts that arrive together go to the same worker.

Prompts are kept in a radix tree. A key stands for the whole prompt up to its block, so two prompts that agree in one
key agree in all keys before it: their common prefix is found by binary search instead of comparing every key.
"""

from __future__ import annotations

from collections.abc import Sequence

LIFETIME_S = 10.0
"""An expectation lives for one to two lifetimes; by then the worker has reported the block, or never will."""
MAX_KEYS = 2**18
"""Keys per generation of the tree; beyond that the older generation is dropped early."""


class _Node:
    """An edge of the tree: part of a prompt that ends before block `end`, and the slots expected to hold it."""

    __slots__ = ("bits", "children", "end", "keys")

    def __init__(self, keys: Sequence[int], end: int, bits: int) -> None:
        self.keys, self.end, self.bits = keys, end, bits
        self.children: dict[int, _Node] = {}


class ExpectedBlocks:
    """Prompts with sets of slots, in two generations: dropping the older one forgets what was not confirmed."""

    def __init__(self) -> None:
        self._young, self._old = _Node((), 0, 0), _Node((), 0, 0)
        self._keys = 0
        self._since_s = 0.0

    def add(self, keys: Sequence[int], bits: int, now: float) -> None:
        """The slots in `bits` will hold the blocks `keys` of one prompt. `keys` is kept and must not be mutated."""
        self.expire(now)
        if self._keys > MAX_KEYS:
            self._begin(self._young, now)
        node, at, count = self._young, 0, len(keys)
        while at < count:
            child = node.children.get(keys[at])
            if child is None:
                node.children[keys[at]] = _Node(keys, count, bits)
                self._keys += count
                return
            shared = _shared(child.keys, keys, at, min(child.end, count))
            if shared < child.end:
                upper = _Node(child.keys, shared, child.bits)
                upper.children[child.keys[shared]] = child
                node.children[keys[at]] = child = upper
            child.bits |= bits
            node, at = child, shared

    def expire(self, now: float) -> None:
        """Drops a generation that has expired."""
        age_s = now - self._since_s
        if age_s >= LIFETIME_S:
            self._begin(self._young if age_s < 2 * LIFETIME_S else _Node((), 0, 0), now)

    def levels(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """(leading blocks, slots expected to hold them) of a prompt. A slot may be in several levels."""
        found: list[tuple[int, int]] = []
        for node in (self._young, self._old):
            at, count = 0, len(keys)
            while at < count and (child := node.children.get(keys[at])) is not None:
                at = _shared(child.keys, keys, at, min(child.end, count))
                found.append((at, child.bits))
                if at < child.end:
                    break
                node = child  # noqa: PLW2901
        return found

    def clear(self) -> None:
        """Forgets everything."""
        self._begin(_Node((), 0, 0), self._since_s)

    def _begin(self, old: _Node, now: float) -> None:
        self._old, self._young, self._keys, self._since_s = old, _Node((), 0, 0), 0, now


def _shared(one: Sequence[int], other: Sequence[int], at: int, stop: int) -> int:
    """First block before `stop` where two prompts that agree in block `at` differ; `stop` if there is none."""
    if one[stop - 1] == other[stop - 1]:
        return stop
    low, high = at + 1, stop - 1
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
