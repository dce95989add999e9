"""torch without what is not used: a package that nobody foresaw makes a worker's imports slow, and never wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

LEAN = """
import sys
import engine.model.lean_torch as lean
import torch
"""
NAMED = """
def found(name):
    module = torch
    for part in name.split(".")[1:]:
        module = getattr(module, part, None)
    return module is not None and module is sys.modules.get(name)
"""
BOUND = (
    "import sys, torch\n"
    + NAMED
    + "print(*[name for name in sorted(sys.modules) if name[:6] == 'torch.' and found(name)])"
)
REFERENCE = "torch.ao.nn.quantized.reference"
"""Only torch.ao.quantization brings it, without being asked."""


def run(program: str, *path: Path) -> str:
    """What a program prints in a new interpreter; an assertion in it fails the test."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, *filter(None, sys.path))))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_all_that_torch_binds_is_found_without_an_import() -> None:
    names = [name for name in run(BOUND).split() if not name.startswith(REFERENCE)]
    assert "torch._functorch.eager_transforms" in names
    run(f"{LEAN}{NAMED}\nassert [name for name in {names} if not found(name)] == []")


ODD = """
def odd():
    import odd_package
    return odd_package.one()
"""
WORKS = """
assert torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.zeros(1)) == 1
"""
COUNTING = """
calls = []
def fail(error):
    calls.append(error)
    raise error("no")
def count(error):
    calls.clear()
    try:
        lean.lean_or_whole(lambda: fail(error))
    except error:
        return len(calls), "torch._dynamo" in sys.modules
"""


def odd_package(folder: Path, code: str) -> Path:
    (folder / "odd_package.py").write_text(
        f"import torch\n@torch.compiler.disable\ndef one(): return 1\n{code}\n"
    )
    return folder


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_package_that_wants_the_compiler_is_imported_as_ever(tmp_path: Path) -> None:
    as_torchvision = "from torch._dynamo.utils import is_compile_supported"
    run(f"{LEAN}{ODD}assert lean.lean_or_whole(odd) == 1{WORKS}", odd_package(tmp_path, as_torchvision))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_fails_with_a_stand_in_is_imported_again_and_what_fails_anyway_is_not(tmp_path: Path) -> None:
    before = "assert count(ValueError) == count(KeyboardInterrupt) == (1, False)\n"
    after = "assert count(AttributeError) == (1, True)"
    package = odd_package(tmp_path, "import torch._dynamo\nwhere = torch._dynamo.__file__")
    run(f"{LEAN}{ODD}{COUNTING}{before}assert lean.lean_or_whole(odd) == 1{WORKS}{after}", package)
