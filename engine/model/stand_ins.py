"""Keeps torch's compiler from being imported where only its decorators are used, or where its shapes are plain numbers.

It is a third of what a worker would import. torch itself imports it at the first call of functions that it must not
trace, and on the meta device. Read `without_compiler` first.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


def _decorate(function: Any = None, *_args: object, **_options: object) -> Any:
    """Stands for a decorator of the compiler, with or without options: without the compiler it changes nothing."""
    return function if callable(function) else lambda decorated: decorated


def _known(value: Any, *_where: object, **_how: object) -> Any:
    """Stands for a guard on a shape or a condition of shapes, of which none is symbolic here."""
    return value


_SHAPES = {
    **dict.fromkeys(
        ("expect_true", "guard_size_oblivious", "guard_or_false", "guard_or_true", "statically_known_true"),
        _known,
    ),
    **dict.fromkeys(("guarding_hint_or_throw", "size_hint"), _known),
    **dict.fromkeys(("has_guarding_hint", "has_hint"), lambda _size: True),
    "has_free_unbacked_symbols": lambda _sizes: False,
    "is_nested_int": lambda _size: False,
    "sym_and": lambda *conditions: all(conditions),
    "sym_or": lambda *conditions: any(conditions),
    "sym_eq": operator.eq,
}
STAND_INS: Mapping[str, Mapping[str, Any]] = {
    COMPILER: dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), _decorate),
    # For masks that the models do not make here.
    f"{COMPILER}._trace_wrapped_higher_order_op": {"TransformGetItemToIndex": object},
    # The meta device asks whether sizes are expressions.
    "torch.fx.experimental.symbolic_shapes": _SHAPES,
    "sympy": {"Basic": type("Basic", (), {})},
}
"""By module, what stands for the compiler. Whoever wants more of it gets the compiler."""


class Imported(importlib.abc.Loader):
    """Loads a module that its package has imported meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self._content, self._spec = vars(module), module.__spec__
        # Else the import system would take that in place of this one, and run the module's code again.
        self._content["__spec__"] = None
        self._module = module

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module that there is."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Leaves it as it is."""
        self._content["__spec__"] = self._spec


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `STAND_INS` in place of modules that are not imported yet, until anything else of these is wanted."""

    def __init__(self) -> None:
        self._names = [name for name in STAND_INS if name not in sys.modules]

    def open(self) -> None:
        sys.meta_path.insert(0, self)

    def close(self) -> None:
        """All is imported as ever from now on."""
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        for name in self._names:
            if sys.modules.pop(name, None) is None:
                continue
            package, _, child = name.rpartition(".")
            if package in sys.modules:
                vars(sys.modules[package]).pop(child, None)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in self._names:
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            if spec.submodule_search_locations is not None:
                folders = sys.path if path is None else path
                spec.submodule_search_locations += [f"{one}/{name.rpartition('.')[2]}" for one in folders]
            return spec
        package = name.rpartition(".")[0]
        if package not in self._names:
            return None
        self.close()
        importlib.import_module(package)
        imported = sys.modules.get(name)
        return None if imported is None else importlib.machinery.ModuleSpec(name, Imported(imported))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__

        def lookup(wanted: str) -> Any:
            if wanted in STAND_INS[name]:
                return STAND_INS[name][wanted]
            if wanted.startswith("__"):
                raise AttributeError(wanted)
            self.close()
            return getattr(importlib.import_module(name), wanted)

        module.__getattr__ = lookup  # type: ignore[method-assign]


@contextmanager
def without_compiler() -> Iterator[None]:
    """While it is open, torch and models find `STAND_INS` in place of the compiler.

    What is imported already stays as it is, and whoever wants more of it gets it all. May be nested; for one thread at
    a time.
    """
    stand_ins = _StandIns()
    stand_ins.open()
    try:
        yield
    finally:
        stand_ins.close()
