"""Replaces the progress bars of `transformers` by calls of a function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

Fraction = Callable[[float], None]

_WEIGHTS = "Loading weights"
_GGUF_SHARE = 0.9
"""Share of a GGUF's loading time that dequantizing takes."""
_lock = threading.Lock()


@contextmanager
def report_progress(progress: Fraction, *, gguf: bool = False) -> Iterator[None]:
    """Within the context, calls `progress(fraction)` while `transformers` loads weights; no bar is drawn.

    The fraction counts weight tensors, 0..1. The hooks of `transformers` are process-wide, so a lock admits one
    thread at a time.
    """
    start = _GGUF_SHARE if gguf else 0.0

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") == _WEIGHTS and args:
            return _counted(list(args[0]), start, 1.0, progress)
        return factory(*args, **(kwargs | {"disable": True}))

    def gguf_bar(items: Any, **_: Any) -> Iterator[Any]:
        return _counted(list(items), 0.0, _GGUF_SHARE, progress)

    with _lock, ExitStack() as stack:
        if gguf:
            stack.enter_context(_reading_with(gguf_bar))
        hook = transformers_logging.set_tqdm_hook(bar)
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            transformers_logging.set_tqdm_hook(hook)


@contextmanager
def _reading_with(bar: Callable[..., Any]) -> Iterator[None]:
    """The GGUF reader uses tqdm directly, bypassing the hook."""
    # Imported here: the import is slow, and few models are GGUF files.
    from transformers import modeling_gguf_pytorch_utils as gguf_reading

    before, gguf_reading.tqdm = gguf_reading.tqdm, bar
    try:
        yield
    finally:
        gguf_reading.tqdm = before


def _counted(items: list[Any], start: float, end: float, progress: Fraction) -> Iterator[Any]:
    percent = -1
    for index, item in enumerate(items, 1):
        yield item
        if (now := 100 * index // len(items)) > percent:
            percent = now
            progress(start + (end - start) * index / len(items))
