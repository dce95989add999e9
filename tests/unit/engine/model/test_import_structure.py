"""The kept table of what `transformers` can import is what it would make; one that cannot be believed is made anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.model import import_structure
from engine.model.import_structure import Structure, from_text, kept, kept_file, to_text
from tests.support.waiting import PATIENCE_S

MADE: Structure = {
    frozenset(): {"init": {"A", "B"}},
    "llama": {
        frozenset(): {"configuration_llama": {"C"}},
        frozenset({"torch"}): {"modeling_llama": {"D", "E"}},
    },
}


class Installed:
    """The record of an installation."""

    version = "1.0"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.locate_file("transformers-1.0.dist-info").mkdir()
        self.locate_file("transformers-1.0.dist-info/RECORD").write_text("")

    def locate_file(self, path: str) -> Path:
        return self.root / path


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPLITSERVE_HOME", str(tmp_path / "home"))
    installed = Installed(tmp_path)
    monkeypatch.setattr(import_structure, "distribution", lambda _name: installed)
    folder = tmp_path / "transformers" / "models"
    folder.mkdir(parents=True)
    return folder


class Reader:
    """Counts how often the source files are read."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def __call__(self, module_path: str) -> Structure:
        self.reads.append(module_path)
        return from_text(to_text(MADE))

    def fresh(self) -> Callable[[str], Structure]:
        """The function of a process that has just begun."""
        return kept(self)


def test_it_is_made_once_for_both_who_ask_and_for_later_starts(models: Path) -> None:
    reader = Reader()
    ask = reader.fresh()
    assert ask(str(models)) == ask(str(models / "__init__.py")) == MADE
    assert reader.fresh()(str(models)) == MADE
    assert len(reader.reads) == 1


def test_nobody_changes_what_the_next_one_gets(models: Path) -> None:
    ask = Reader().fresh()
    ask(str(models)).clear()
    assert ask(str(models)) == MADE


def test_single_models_are_read_as_ever(models: Path) -> None:
    reader = Reader()
    ask = reader.fresh()
    for _ in range(2):
        ask(str(models / "llama" / "__init__.py"))
    assert len(reader.reads) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_text(file.read_text()[:-10]),
        lambda file: file.write_text(""),
        lambda file: file.write_bytes(b"\xff\xfe"),
        lambda file: file.write_text(file.read_text().replace("configuration_llama", "configuration_other")),
        lambda file: file.chmod(0o666),
        lambda file: file.write_text(to_text(MADE) + " " * import_structure.MAX_BYTES),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["torn", "empty", "no-text", "changed", "open-to-others", "large", "a-folder"],
)
def test_what_cannot_be_believed_is_made_anew(models: Path, spoil: Callable[[Path], object]) -> None:
    reader = Reader()
    reader.fresh()(str(models))
    spoil(kept_file(models))
    assert reader.fresh()(str(models)) == MADE
    assert len(reader.reads) == 2


def test_another_installation_has_another(models: Path) -> None:
    before = kept_file(models)
    os.utime(models, ns=(0, 0))
    assert kept_file(models) != before


def test_a_cache_folder_that_cannot_be_written(models: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    reader = Reader()
    for _ in range(2):
        assert reader.fresh()(str(models)) == MADE
    assert len(reader.reads) == 2


def test_nothing_is_kept_of_files_beside_the_installation(models: Path, tmp_path: Path) -> None:
    """Those of an editable one, whose record does not change with them."""
    beside = tmp_path / "sources" / "models"
    beside.mkdir(parents=True)
    reader = Reader()
    for _ in range(2):
        assert reader.fresh()(str(beside)) == MADE
    assert len(reader.reads) == 2
    assert not (tmp_path / "home").exists()


def test_a_user_without_a_home(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SPLITSERVE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert Reader().fresh()(str(models)) == MADE


SAME = """
import sys
from engine.model.lean_transformers import AutoConfig
import transformers, transformers.models
from transformers.utils import import_utils
from engine.model.import_structure import kept_file, read, from_text
from pathlib import Path
folder = Path(transformers.models.__file__).parent
kept = import_utils.create_import_structure_from_path
made = kept.__closure__[[*kept.__code__.co_freevars].index("create")].cell_contents(str(folder))
assert from_text(read(folder)) == made == kept(str(folder))
assert transformers.LlamaConfig().model_type == "llama"
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_it_is_what_transformers_makes(models: Path) -> None:
    for _ in range(2):  # made, and read
        done = subprocess.run(
            [sys.executable, "-c", SAME], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr
