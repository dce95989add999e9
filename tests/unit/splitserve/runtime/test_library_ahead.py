"""torch's library is loaded beside other imports, and no thread stays."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.waiting import PATIENCE_S

LOADED = """
import os, sys
from splitserve.runtime.library_ahead import finish_loading, load_ahead
load_ahead()
load_ahead()
assert "torch" not in sys.modules
finish_loading()
finish_loading()
assert len(os.listdir("/proc/self/task")) == 1
assert "libtorch_cpu.so" in open("/proc/self/maps").read()
import torch
assert torch.ones(2).sum() == 2
load_ahead()
assert len(os.listdir("/proc/self/task")) == 1
"""
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from splitserve.runtime.library_ahead import finish_loading, load_ahead
load_ahead()
finish_loading()
assert "libtorch_cpu.so" not in open("/proc/self/maps").read()
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="only there")
@pytest.mark.parametrize("program", [LOADED, WITHOUT_TORCH])
def test_a_library_is_loaded_ahead(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
