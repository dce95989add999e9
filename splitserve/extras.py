"""Which optional parts of splitserve are installed: asked before anything is started that needs them."""

from __future__ import annotations

from importlib.util import find_spec

from splitserve.errors import MissingExtraError

NIXL = ("nixl_cu13", "nixl")
"""Modules of NIXL: one for CUDA 13, and one that chooses."""
_ENGINES = {"torch": ("cpu", ("torch", "transformers")), "vllm": ("vllm", ("vllm",))}
"""By engine: the extra that it comes with, and modules of it."""


def installed(module: str) -> bool:
    """Whether a top-level module is installed. Does not import it."""
    try:
        return find_spec(module) is not None
    except ValueError:  # something stands in for it
        return True


def require(what: str, extra: str, *modules: str) -> None:
    """Raises MissingExtraError for `what` unless these modules, which come with the extra, are installed."""
    if not all(map(installed, modules)):
        raise MissingExtraError(what, extra)


def require_worker(engine: str, transport: str) -> None:
    """Raises MissingExtraError unless workers of this engine and transport can start."""
    extra, modules = _ENGINES.get(engine, ("cpu", ()))
    require(f"engine {engine}", extra, *modules)
    if transport == "nixl" and not any(map(installed, NIXL)):
        raise MissingExtraError("transport nixl", extra)
