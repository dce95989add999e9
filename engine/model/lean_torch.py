"""torch, imported without the code of what only training, compiling and exporting use, until someone uses that.

A large part of `import torch` are such modules, and this engine touches none of them. Import this before torch; in a
process that had imported torch before, nothing changes. Why: docs/decisions/0061-cold-start.md.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

from engine.model.deferred_modules import DeferringFinder, offer_submodules, run
from engine.model.stand_ins import COMPILER, without_compiler
from splitserve.logs import log_event

T = TypeVar("T")
META = "torch._meta_registrations"
"""Shapes of operations' results, for those that are not computed: for the compiler, and for some on the meta device."""
DEFERRED: dict[str, tuple[str, ...]] = {
    META: (),
    "torch._lobpcg": ("lobpcg",),
    "torch.ao": (),
    "torch.distributed": (),
    "torch.distributed._meta_registrations": (),
    "torch.export": (),
    "torch.func": ("vmap",),
    "torch.masked": (),
    "torch.nn.intrinsic": (),
    "torch.nn.qat": (),
    "torch.nn.quantizable": (),
    "torch.nn.quantized": (),
    "torch.quantization": (),
    "torch.onnx": (),
    "torch.testing": (),
}
GENERATORS = "torch._prims.rng_prims"
"""`torch.Generator()` raises until this is imported, which the compiler's modules do otherwise."""
FOR_CUDA = ("cuda.bindings", "pynvml")
"""What torch asks for, and does without where it is missing. A build without CUDA never uses it."""
_COMPILING = (META, "torch.distributed._meta_registrations", "torch.func")
NEEDS = {
    COMPILER: _COMPILING,
    "torch._inductor": _COMPILING,
    "torch.export._trace": _COMPILING,
    # What would have imported the modules below this.
    "torch.ao.nn": ("torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized"),
    # These two import each other, which only works in this order: export would be the first to do so.
    "torch._higher_order_ops": ("torch.fx.passes",),
}


def with_whole_meta_device(make: Callable[[], T]) -> T:
    """What `make` returns; again with what was left out of the meta device, if it fails without."""
    try:
        return make()
    except NotImplementedError:
        if not run(META):
            raise
        return make()


def lean_or_whole(do: Callable[[], T]) -> T:
    """What `do` returns with stand-ins for the compiler; once more with all of torch, if that fails in any way but a
    ValueError, which is about what was asked. So a package that nobody foresaw costs time, and stops nothing."""
    try:
        with without_compiler():
            return do()
    except ValueError:
        raise
    except Exception as error:
        if not _import_whole():
            raise
        why = f"{type(error).__name__}: {error}"
        log_event("engine.imported_whole", level=logging.WARNING, why=why)
        return do()


def _import_whole() -> bool:
    """Imports what was left out of torch, and its compiler. Returns whether there was any."""
    left_out = [run(name) for name in DEFERRED]
    there = COMPILER in sys.modules
    importlib.import_module(COMPILER)
    return any(left_out) or not there


def _import() -> None:
    if "torch" in sys.modules:
        return
    sys.meta_path.insert(0, DeferringFinder(DEFERRED, NEEDS))
    absent = [name for name in FOR_CUDA if version("torch").endswith("+cpu") and name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        importlib.import_module("torch")
        importlib.import_module(GENERATORS)
        offer_submodules("torch")
    finally:
        for name in absent:
            del sys.modules[name]


_import()
