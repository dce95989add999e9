"""Modules whose code runs when something in them is first wanted, and not when they are named.

A package imports much that its users may never touch. Modules whose names are given are found here: `import` gives a
module that is still empty, and the first look at a name in it, or the import of a module below it, runs its own code.
So nothing is replaced: who uses such a module has the real one, only later. What such a module would have imported is
imported when it is looked up in its package.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from engine.model.stand_ins import Imported

_LOCK = threading.RLock()
_EMPTY: dict[str, _Deferred] = {}
"""By name, the modules whose code has not run."""


class _Deferred(importlib.abc.Loader):
    """Loads a module that stays empty, and runs its own code later."""

    def __init__(self, loader: importlib.abc.Loader, functions: Sequence[str]) -> None:
        self._loader, self._functions = loader, functions
        self._given: dict[str, Callable[..., Any]] = {}

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._module = module
        _EMPTY[module.__name__] = self
        module.__getattr__ = self._look_up  # type: ignore[method-assign]

    def _look_up(self, wanted: str) -> Any:
        name, content = self._module.__name__, vars(self._module)
        if not wanted.startswith("__") or wanted == "__all__":
            with _LOCK:
                if wanted in self._functions and name in _EMPTY:
                    return self._given.setdefault(wanted, self._function(wanted))
                run(name)
            if wanted in content:
                return content[wanted]
            if content.get("__getattr__", self._look_up) != self._look_up:
                return content["__getattr__"](wanted)
        raise AttributeError(f"module {name!r} has no attribute {wanted!r}")

    def _function(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            run(self._module.__name__)
            return vars(self._module)[name](*args, **kwargs)

        return call

    def run(self) -> None:
        module, content = self._module, vars(self._module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException:
            sys.modules.pop(module.__name__, None)  # as of any module that cannot be imported
            raise
        finally:
            if content.get("__getattr__") == self._look_up:
                del module.__getattr__
        root = vars(sys.modules[module.__name__.partition(".")[0]])
        for name, given in self._given.items():
            if root.get(name) is given:
                root[name] = content[name]


def run(name: str) -> bool:
    """Runs the code of a module if it has not run, and before it that of the packages that it is in. Returns whether it
    had not."""
    with _LOCK:
        if package := name.rpartition(".")[0]:
            run(package)
        deferred = _EMPTY.pop(name, None)
        if deferred is not None:
            deferred.run()
        return deferred is not None


def offer_submodules(root: str) -> None:
    """Lets the packages that are imported so far, `root` and those below it, import a module of theirs when it is first
    looked up in them.

    Deferred modules would have imported it and so bound it there, and code relies on that without an import of its own.
    """
    for name, module in list(sys.modules.items()):
        below = name == root or name.startswith(f"{root}.")
        # Others than modules have lookups of their own.
        if below and type(module) is ModuleType and "__path__" in vars(module) and name not in _EMPTY:
            vars(module)["__getattr__"] = _lookup(name, vars(module).get("__getattr__"))


def _lookup(package: str, own: Callable[[str], Any] | None) -> Callable[[str], Any]:
    def look_up(wanted: str) -> Any:
        if own is not None:
            with suppress(AttributeError):
                return own(wanted)
        name = f"{package}.{wanted}"
        if wanted.isidentifier() and not wanted.startswith("__"):
            try:
                return importlib.import_module(name)
            except ImportError as error:
                # Also one that cannot be imported here: whoever looks, as `hasattr` does, has not imported it.
                raise missing(wanted) from error
        raise missing(wanted)

    def missing(wanted: str) -> AttributeError:
        message = f"module {package!r} has no attribute {wanted!r}"
        return AttributeError(message, name=wanted, obj=sys.modules[package])

    return look_up


class DeferringFinder(importlib.abc.MetaPathFinder):
    """Finds modules whose code is to run later. It stays in `sys.meta_path`, before others."""

    def __init__(self, names: Mapping[str, Sequence[str]], needs: Mapping[str, Sequence[str]]) -> None:
        """`names`: the modules, and of each the functions that its root package takes from it; until the module's code
        has run, the root has others in their place, which run it when they are called. `needs`: modules, and
        those whose code must have run before theirs."""
        self._names, self._needs = names, dict(needs)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A module that stays empty, or none of these; before that runs what the module needs."""
        if name in self._names:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Deferred(spec.loader, self._names[name])
            return spec
        reloaded = name in sys.modules
        # Once: these may import the module themselves, and then without the rest of them.
        for needed in self._needs.pop(name, ()):
            importlib.import_module(needed)
            run(needed)
        if (package := name.rpartition(".")[0]) in _EMPTY:
            run(package)
        # One of these may have imported it.
        imported = None if reloaded else sys.modules.get(name)
        return None if imported is None else importlib.machinery.ModuleSpec(name, Imported(imported))
