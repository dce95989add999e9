"""SIGTERM ends a coordinator whatever its threads and loops do."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from coordinator.service import Coordinator, running_coordinator
from splitserve.config.coordinator import CoordinatorConfig
from tests.support.cluster.processes import ServiceProcess
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

pytestmark = pytest.mark.timeout(LEAST_TIMEOUT_S)

STUCK = "tests.support.stuck_services"
ENDED = "1: it was ended after END_S"


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


@contextmanager
def coordinator_with(log_dir: Path, *options: str, stuck: bool = False) -> Iterator[ServiceProcess]:
    """`stuck`: it never loads a tokenizer to the end."""
    arguments = ["coordinator", "--grpc-port", "0", "--http-port", "0", "--drain", "0", *options]
    coordinator = ServiceProcess("coordinator", arguments, log_dir)
    if stuck:
        coordinator = ServiceProcess("coordinator", ["load", *arguments], log_dir, module=STUCK)
    coordinator.start()
    try:
        coordinator.wait_event("coordinator.ready")
        yield coordinator
    finally:
        coordinator.kill()


def test_a_tokenizer_that_never_loads_holds_up_no_stop(log_dir: Path) -> None:
    with coordinator_with(log_dir, "--tokenizer", "any", stuck=True) as coordinator:
        coordinator.wait_event("test.loading")
        assert coordinator.terminate() == 0, ENDED


def test_a_tokenizer_file_that_never_ends_is_refused_and_holds_up_no_stop(
    log_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    os.mkfifo(model / "tokenizer_config.json")
    with coordinator_with(log_dir, "--tokenizer", str(model)) as coordinator:
        assert "no regular file but a pipe" in coordinator.wait_event("tokenizer.failed")["error"]
        assert coordinator.terminate() == 0, ENDED


def test_a_file_that_cannot_be_read_to_its_end_holds_up_no_stop(log_dir: Path, tmp_path: Path) -> None:
    routes, pipe = tmp_path / "routes.yaml", tmp_path / "pipe"
    routes.write_text("m: {m-v1: 1}\n")
    os.mkfifo(pipe)
    with coordinator_with(log_dir, "--model-routes-file", str(routes)) as coordinator:
        pipe.rename(routes)
        with held_open(routes):
            assert coordinator.terminate() == 0, ENDED


async def test_a_loop_that_does_not_end_holds_up_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    monkeypatch.setattr("splitserve.runtime.cancellation.END_S", 0.1)
    monkeypatch.setattr(Coordinator, "background_loops", lambda _: {"stubborn": stubborn})
    config = CoordinatorConfig(host="127.0.0.1", grpc_port=0, http_port=None)
    async with running_coordinator(config):
        await asyncio.sleep(0)
    assert not release.is_set()
    release.set()
