"""Turns the progress bars of `transformers` into calls of a function, and keeps the terminal quiet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import modeling_gguf_pytorch_utils as gguf_reading
from transformers.utils import logging as transformers_logging

Fraction = Callable[[float], None]

_WEIGHTS = "Loading weights"
_GGUF_SHARE = 0.9
"""Dequantizing a GGUF takes nearly all of its loading time."""
_lock = threading.Lock()


@contextmanager
def report_progress(progress: Fraction, *, gguf: bool = False) -> Iterator[None]:
    """Within the block, `progress(fraction)` is called as `transformers` loads weights, and no bar is drawn.

    The fraction counts weight tensors, 0..1. The hooks of `transformers` are one set for the whole process,
    so only one thread at a time is let in.
    """
    start = _GGUF_SHARE if gguf else 0.0

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") == _WEIGHTS and args:
            return _counted(list(args[0]), start, 1.0, progress)
        return factory(*args, **(kwargs | {"disable": True}))

    def gguf_bar(items: Any, **_: Any) -> Iterator[Any]:
        return _counted(list(items), 0.0, _GGUF_SHARE, progress)

    with _lock:
        hook = transformers_logging.set_tqdm_hook(bar)
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        # The GGUF reader takes its bar from tqdm itself, past the hook.
        reader_bar = gguf_reading.tqdm
        gguf_reading.tqdm = gguf_bar
        try:
            yield
        finally:
            gguf_reading.tqdm = reader_bar
            transformers_logging.set_verbosity(verbosity)
            transformers_logging.set_tqdm_hook(hook)


def _counted(items: list[Any], start: float, end: float, progress: Fraction) -> Iterator[Any]:
    percent = -1
    for index, item in enumerate(items, 1):
        yield item
        if (now := 100 * index // len(items)) > percent:
            percent = now
            progress(start + (end - start) * index / len(items))
