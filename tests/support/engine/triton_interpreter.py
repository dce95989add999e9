"""Triton's kernels on a machine without a GPU: run by its interpreter, in this process, undoing it afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "TRITON_INTERPRET"
_COMPILED = "triton._C"
"""The part of triton in C++, which cannot be loaded twice."""
_KERNELS = "engine.backends.cuda"
_KEPT = "interpreted:"
"""Before the names of modules that are kept for the next time. In `sys.modules`, so that they are cleared at exit."""


@contextmanager
def triton_interpreter() -> Iterator[None]:
    """Within it, `import triton` and everything in `engine.backends.cuda` give interpreted versions of their own.

    Triton decides when it is imported, and somebody (torch, through transformers) may have imported it before. So its
    modules are put aside and come back at the end.
    """
    compiled = _take_out()
    for name in [name for name in sys.modules if name.startswith(_KEPT)]:
        sys.modules[name.removeprefix(_KEPT)] = sys.modules.pop(name)
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
        sys.modules.update({_KEPT + name: module for name, module in _take_out().items()})
        sys.modules.update(compiled)


def _take_out() -> dict[str, object]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _is_affected(name)}


def _is_affected(name: str) -> bool:
    if name == _COMPILED or name.startswith(_COMPILED + "."):
        return False
    return name in ("triton", _KERNELS) or name.startswith(("triton.", f"{_KERNELS}."))
