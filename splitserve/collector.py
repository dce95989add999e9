"""Python's garbage collector, set for a process that makes many objects and few cycles."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""New containers between two looks at the youngest generation. Python's default of 700 would look at them hundreds of
times a second under load, and find next to nothing: protobuf messages, tasks and futures end by reference count."""


def relax_collector() -> None:
    """Leaves what exists now, modules and classes above all, out of every later collection. Call once, after start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 50)
