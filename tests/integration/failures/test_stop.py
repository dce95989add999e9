"""SIGTERM ends a coordinator whatever its threads do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.cluster.processes import ServiceProcess
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

pytestmark = pytest.mark.timeout(LEAST_TIMEOUT_S)


@contextmanager
def held_open(pipe: Path) -> Iterator[None]:
    """Opens a pipe once somebody reads it, who then waits for what never comes."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(OSError):  # nobody reads yet
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            break
        time.sleep(0.01)
    else:
        raise AssertionError(f"nobody has opened {pipe} within {PATIENCE_S} s")
    try:
        yield
    finally:
        os.close(writer)


def test_a_tokenizer_that_never_loads_holds_up_no_stop(log_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    os.mkfifo(model / "tokenizer_config.json")
    options = ["coordinator", "--grpc-port", "0", "--http-port", "0", "--drain", "0"]
    options += ["--tokenizer", str(model)]
    coordinator = ServiceProcess("coordinator", options, log_dir)
    coordinator.start()
    try:
        coordinator.wait_event("coordinator.ready")
        with held_open(model / "tokenizer_config.json"):
            assert coordinator.terminate() == 0, "1: it was ended after END_S"
    finally:
        coordinator.kill()
