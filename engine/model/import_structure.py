"""Keeps the table of what `transformers` can import, which it makes at each start by reading all of its source files.

That is 2,700 files, read twice. The table has names only: which of its modules has a class, and which libraries a
module needs. It is kept in the cache folder for one installation of one version, and made anew where it is not that.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from splitserve.models.sources import cache_folder

MODULE = "transformers.utils.import_utils"
FUNCTION = "create_import_structure_from_path"
MAX_BYTES = 16 << 20
_FORMAT = 1
UNUSABLE = (OSError, ImportError, ValueError, TypeError, AttributeError, RuntimeError)
"""What reading may raise: nothing kept, no record of the installation, no home, or a text that is not one of these."""

Structure = dict[Any, Any]
"""By folder the structure below it; by a frozenset of library names, the classes of each module."""


class _Loader(importlib.abc.Loader):
    """Loads the module, and puts `kept` in the place of its function."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As ever."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Runs its code."""
        self._loader.exec_module(module)
        if FUNCTION in vars(module):
            setattr(module, FUNCTION, kept(vars(module)[FUNCTION]))


class StructureFinder(importlib.abc.MetaPathFinder):
    """Finds `MODULE`, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec with another loader; None for any other."""
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def kept(create: Callable[[str], Structure]) -> Callable[[str], Structure]:
    """The function with a memory for the folder of all models, in this process and in the cache folder."""
    texts: dict[str, str] = {}

    def create_or_read(module_path: str) -> Structure:
        folder = Path(module_path)
        folder = folder.parent if folder.suffix == ".py" else folder
        if folder.name != "models":
            return create(module_path)
        try:
            text = texts.get(str(folder)) or read(folder)
            structure = from_text(text)
        except UNUSABLE:
            structure = create(module_path)
            text = to_text(structure)
            with suppress(*UNUSABLE):  # a folder that cannot be written: made at each start
                write(folder, text)
        texts[str(folder)] = text
        return structure

    return create_or_read


def kept_file(folder: Path) -> Path:
    """Where the structure of this installation is kept. Raises ValueError for a folder that is not of the installed
    files: those of an editable installation change, and its record does not."""
    files = distribution("transformers")
    if not folder.resolve().is_relative_to(Path(str(files.locate_file("transformers"))).resolve()):
        raise ValueError(f"{folder} is not of the installation")
    record = files.locate_file(f"transformers-{files.version}.dist-info/RECORD")
    stats = [os.stat(path) for path in (str(record), folder)]
    key = [
        _FORMAT,
        sys.version,
        files.version,
        str(folder),
        *[(one.st_mtime_ns, one.st_size) for one in stats],
    ]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    return cache_folder() / "imports" / f"{name}.json"


def read(folder: Path) -> str:
    """The kept text. Raises OSError or ValueError where there is none that may be believed."""
    with kept_file(folder).open(encoding="utf-8") as file:
        stat = os.fstat(file.fileno())
        if stat.st_uid not in {0, os.geteuid()} or stat.st_mode & 0o022 or stat.st_size > MAX_BYTES:
            raise ValueError("written by others, or too large")
        return file.read()


def write(folder: Path, text: str) -> None:
    """Keeps a text: whole or not at all."""
    target = kept_file(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as work:
        made = Path(work) / target.name
        made.write_text(text, encoding="utf-8")
        made.chmod(0o644)
        made.replace(target)


def to_text(structure: Structure) -> str:
    """A structure as JSON with a checksum before it."""
    body = json.dumps(_plain(structure))
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def from_text(text: str) -> Structure:
    """The structure of a text. Raises ValueError for one that is torn or of another form."""
    checksum, _, body = text.partition("\n")
    if hashlib.sha256(body.encode()).hexdigest() != checksum:
        raise ValueError("torn")
    return _structure(json.loads(body))


def _plain(structure: Structure) -> list[Any]:
    found: list[Any] = []
    for key, value in structure.items():
        if isinstance(key, frozenset):
            found.append([sorted(key), {module: sorted(names) for module, names in value.items()}])
        else:
            found.append([key, _plain(value)])
    return found


def _structure(plain: Any) -> Structure:
    if not isinstance(plain, list):
        raise ValueError("not a structure")
    found: Structure = {}
    for key, value in plain:
        if isinstance(key, str):
            found[key] = _structure(value)
        else:
            found[frozenset(map(str, key))] = {
                str(module): set(map(str, names)) for module, names in value.items()
            }
    return found
