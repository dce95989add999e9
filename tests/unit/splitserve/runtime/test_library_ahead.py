"""torch's library is loaded ahead by commands that are going to need it, and by no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

from splitserve.runtime.library_ahead import VARIABLE, needs_torch
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("command", "engine", "needed"),
    [
        ("up", "", True),
        ("up --model m --prefill 2", "torch", True),
        ("prefill-worker --engine torch", "", True),
        ("worker --engine=torch", "", True),
        ("decode-worker", "simulated", False),
        ("up --engine simulated", "", False),
        ("up --engine=vllm", "", False),
        ("up --help", "", False),
        ("coordinator", "", False),
        ("generate up", "", False),
        ("", "", False),
    ],
)
def test_who_needs_it(command: str, engine: str, needed: bool) -> None:
    assert needs_torch(command.split(), {VARIABLE: engine}) == needed


LOADED = """
import os, sys
from splitserve.runtime.library_ahead import finish_loading, load_ahead
load_ahead(["up"], {})
load_ahead(["up"], {})
finish_loading()
finish_loading()
assert len(os.listdir("/proc/self/task")) == 1
assert "libtorch_cpu.so" in open("/proc/self/maps").read()
assert "torch" not in sys.modules
import torch
assert torch.ones(2).sum() == 2
load_ahead(["up"], {})
assert len(os.listdir("/proc/self/task")) == 1
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="only there")
def test_torch_uses_the_loaded_library_and_no_thread_stays() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
