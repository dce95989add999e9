"""A deferred module is the real one, only later: its code runs when something in it is wanted, and once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.model import deferred_modules
from engine.model.deferred_modules import DeferringFinder, offer_submodules, run

FILES = {
    "__init__.py": "log = []\nfrom {name} import quiet as quiet\nfrom {name}.tools import double as double\n",
    "quiet.py": "import {name}\n{name}.log.append('quiet')\nvalue = 1\n",
    "tools.py": "import {name}\n{name}.log.append('tools')\ndef double(x): return 2 * x\n",
    "room/__init__.py": "import {name}\n{name}.log.append('room')\nfrom {name}.room.inner import place as place\n",
    "room/inner.py": "import {name}\n{name}.log.append('inner')\nplace = 'here'\n",
    "broken.py": "import {name}\n{name}.log.append('broken')\nraise ValueError('no')\n",
    "wants.py": "import {name}\n{name}.log.append('wants')\n",
    "yard/__init__.py": "import {name}.yard.gate\n",
    "yard/gate.py": "",
    "yard/shed.py": "",
    "yard/ruin.py": "import no_such_module_anywhere\n",
    "round.py": "import {name}.circle\n{name}.log.append('round')\n",
    "circle.py": "import {name}\n{name}.log.append('circle')\n",
    "own.py": "def __getattr__(name):\n    return name.upper()\n",
}
DEFERRED = {"quiet": (), "tools": ("double",), "room": (), "broken": (), "own": (), "round": ()}


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of its own for each test, imported with its parts deferred."""
    name = f"deferred_{tmp_path.name}".replace("-", "_")
    for file, text in FILES.items():
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    names = {f"{name}.{part}": functions for part, functions in DEFERRED.items()}
    needs = {f"{name}.wants": (f"{name}.quiet",), f"{name}.circle": (f"{name}.round",)}
    finder = DeferringFinder(names, needs)
    sys.meta_path.insert(0, finder)
    yield name
    sys.meta_path.remove(finder)
    for module in [one for one in sys.modules if one.partition(".")[0] == name]:
        del sys.modules[module]
        deferred_modules._EMPTY.pop(module, None)


def test_nothing_runs_until_it_is_wanted(name: str) -> None:
    package = importlib.import_module(name)
    assert package.log == []
    assert package.quiet.__file__.endswith("quiet.py")
    assert package.log == []
    assert package.quiet.value == 1
    assert package.quiet is sys.modules[f"{name}.quiet"]
    assert package.quiet.value == 1
    assert package.log == ["quiet"]
    assert "__getattr__" not in vars(package.quiet)
    with pytest.raises(AttributeError, match="nothing"):
        _ = package.quiet.nothing


def test_a_function_that_the_root_took_is_the_real_one_afterwards(name: str) -> None:
    package = importlib.import_module(name)
    taken = package.double
    assert package.log == []
    assert taken(4) == 8
    assert package.log == ["tools"]
    assert package.double is sys.modules[f"{name}.tools"].double
    assert taken(5) == 10


def test_a_module_below_runs_its_package_first(name: str) -> None:
    package = importlib.import_module(name)
    importlib.import_module(f"{name}.room")
    assert package.log == []
    inner = importlib.import_module(f"{name}.room.inner")
    assert package.log == ["room", "inner"]
    assert inner is sys.modules[f"{name}.room.inner"] is package.room.inner
    assert package.room.place == "here"


def test_what_others_need_runs_before_them(name: str) -> None:
    package = importlib.import_module(name)
    importlib.import_module(f"{name}.wants")
    assert package.log == ["quiet", "wants"]
    assert not run(f"{name}.quiet")


def test_a_module_that_fails_is_imported_anew(name: str) -> None:
    package = importlib.import_module(name)
    broken = importlib.import_module(f"{name}.broken")
    with pytest.raises(ValueError, match="no"):
        _ = broken.value
    assert f"{name}.broken" not in sys.modules
    assert package.log == ["broken"]


def test_a_module_may_find_names_itself(name: str) -> None:
    own = importlib.import_module(f"{name}.own")
    assert (own.first, own.second) == ("FIRST", "SECOND")


def test_what_is_needed_may_import_who_needs_it(name: str) -> None:
    package = importlib.import_module(name)
    circle = importlib.import_module(f"{name}.circle")
    assert package.log == ["circle", "round"], "each once"
    assert circle is sys.modules[f"{name}.circle"]


def test_a_package_imports_what_is_looked_up_in_it(name: str) -> None:
    package = importlib.import_module(name)
    yard = importlib.import_module(f"{name}.yard")
    offer_submodules(name)
    assert yard.shed is sys.modules[f"{name}.yard.shed"]
    assert package.wants is sys.modules[f"{name}.wants"]
    for absent in ("nothing", "__nothing__", "gate.nothing", ""):
        with pytest.raises(AttributeError, match=absent or "attribute ''"):
            getattr(yard, absent)
    assert not hasattr(yard, "ruin"), "what cannot be imported here is not there, for who only looks"
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        importlib.import_module(f"{name}.yard.ruin")
    assert not hasattr(package.quiet, "shed")


def test_a_reload_runs_the_code_again(name: str, tmp_path: Path) -> None:
    shed = importlib.import_module(f"{name}.yard.shed")
    (tmp_path / name / "yard" / "shed.py").write_text("spades = 2\n")
    assert importlib.reload(shed) is shed
    assert shed.spades == 2
