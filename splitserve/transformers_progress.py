"""Turns the progress bars of `transformers` into calls of a function, and keeps the terminal quiet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

_WEIGHTS = "Loading weights"
_lock = threading.Lock()


@contextmanager
def report_progress(progress: Callable[[float], None]) -> Iterator[None]:
    """Within the block, `progress(fraction)` is called as `transformers` loads weights, and no bar is drawn.

    The fraction counts weight tensors, 0..1. The hook of `transformers` is one for the whole process, so
    only one thread at a time is let in.
    """

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") == _WEIGHTS and args:
            return _counted(list(args[0]), progress)
        return factory(*args, **(kwargs | {"disable": True}))

    with _lock:
        before = transformers_logging.set_tqdm_hook(bar)
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            transformers_logging.set_tqdm_hook(before)


def _counted(items: list[Any], progress: Callable[[float], None]) -> Iterator[Any]:
    last = -1
    for index, item in enumerate(items):
        yield item
        percent = 100 * (index + 1) // len(items)
        if percent > last:
            last = percent
            progress((index + 1) / len(items))
