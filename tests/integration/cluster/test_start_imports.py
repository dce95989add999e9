"""A simulated worker needs no model library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

MODEL_LIBRARIES = ("torch", "transformers", "vllm")


def loaded(program: str, names: tuple[str, ...], *path: Path) -> list[str]:
    """Which of these modules a new interpreter has imported after this program. `path`: where it looks first."""
    ask = f"import sys\n{program}\nprint(*[name for name in {names} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, *filter(None, sys.path))))}
    command = [sys.executable, "-c", ask]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=environment
    )
    return done.stdout.split()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("service", ["prefill_worker.service", "decode_worker.service", "worker.process"])
def test_a_simulated_worker_imports_no_model_library(service: str) -> None:
    assert loaded(f"import {service}", MODEL_LIBRARIES) == []
