"""What holds for every test: nothing it started may outlive the run."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

END_TIMEOUT_S = 5.0


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fails the run if a process that a test started is still there at its end; ends it, too."""
    yield
    children = [
        child
        for child in psutil.Process().children(recursive=True)
        if "multiprocessing.resource_tracker" not in " ".join(child.cmdline())  # ends with the run itself
    ]
    _, alive = psutil.wait_procs(children, timeout=END_TIMEOUT_S)
    left = [f"{child.pid} {' '.join(child.cmdline()[:6])}" for child in alive if child.is_running()]
    for child in alive:
        child.kill()
    assert not left, f"processes left behind: {left}"
