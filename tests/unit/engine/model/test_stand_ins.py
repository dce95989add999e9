"""Stand-ins for torch's compiler: gone after their use, and never in the way of who wants the compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.waiting import PATIENCE_S

PRELUDE = """
import sys, torch
from engine.model.stand_ins import STAND_INS, without_compiler
def there(): return sorted(name for name in STAND_INS if name in sys.modules)
"""


def run(program: str) -> None:
    """Runs a program in a new interpreter, which has not imported the compiler; an assertion in it fails the test."""
    command = [sys.executable, "-c", PRELUDE + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


DECORATED = """
with without_compiler():
    @torch.compiler.disable
    def one(): return 1
    @torch.compiler.disable(recursive=False)
    def two(): return 2
    @torch._dynamo.allow_in_graph
    def three(): return 3
    assert (one(), two(), three()) == (1, 2, 3)
    assert there() == ["torch._dynamo"]
assert there() == [] and "_dynamo" not in vars(torch)
"""
SHAPED = """
def shapes():
    with torch.device("meta"):
        left = torch.arange(0, 8, 2, dtype=torch.float) / 3
        made = left.unsqueeze(1) * torch.ones(4, 5) + torch.zeros(5), torch.cat([left, left]), left.view(2, 2)
    return [(tuple(one.shape), one.stride(), one.dtype) for one in made]
with without_compiler():
    inside = shapes()
assert there() == []
assert inside == shapes()
"""
KEPT = """
import torch._dynamo
before = torch._dynamo
with without_compiler():
    import torch._dynamo
    assert torch._dynamo is before
assert sys.modules["torch._dynamo"] is before
"""
WANTED = """
with without_compiler():
    torch.compiler.disable(print)
    {wanted}
    import torch._dynamo
    assert torch._dynamo.__file__
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
"""


@pytest.mark.timeout(120)
def test_decorators_change_nothing_and_leave_nothing_behind() -> None:
    run(DECORATED)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_shapes_on_the_meta_device_are_the_same() -> None:
    run(SHAPED)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "wanted",
    [
        "from torch._dynamo import optimize",
        "import torch._dynamo.config",
        "import sympy; sympy.Symbol('x')",
    ],
)
def test_whoever_wants_more_gets_the_compiler(wanted: str) -> None:
    run(WANTED.format(wanted=wanted))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_imported_compiler_stays() -> None:
    run(KEPT)
