"""What holds for every test: nothing it started may outlive the run, and property tests are deterministic.

`SPLITSERVE_HYPOTHESIS_PROFILE` names the profile of property tests. `fixed`, the default, tries the same examples in
each run. `search` tries new ones, more of them where a test names no number, and prints how to repeat a failure. What
it finds belongs into the test as an `@example`.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.support import jitter
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

PROFILE_VARIABLE = "SPLITSERVE_HYPOTHESIS_PROFILE"

# Neither a deadline nor a check of speed: how long an example takes depends on what else the machine does.
settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "search",
    derandomize=False,
    deadline=None,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get(PROFILE_VARIABLE, "fixed"))

if most_ms := os.environ.get(jitter.VARIABLE):
    jitter.make_sockets_late(float(most_ms) / 1000, random.Random())


def pytest_collection_finish() -> None:
    """Leaves modules and classes out of every later garbage collection, which tests that count on one repeat."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A timeout ends a test that hangs, on a busy machine too; it does not say how fast a test should be."""
    for item in items:
        if item.get_closest_marker("alone") and "integration" not in item.path.parts:
            raise pytest.UsageError(
                f"{item.nodeid}: the run of tests marked `alone` looks in tests/integration only"
            )
        own = item.get_closest_marker("timeout")
        if own is None or own.args[0] < LEAST_TIMEOUT_S:
            item.add_marker(pytest.mark.timeout(LEAST_TIMEOUT_S), append=False)


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fails the run if a process that a test started is still there at its end; ends it, too."""
    yield
    children = [
        child
        for child in psutil.Process().children(recursive=True)
        if "multiprocessing.resource_tracker" not in _command(child)  # ends with the run itself
    ]
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    left = [f"{child.pid} {_command(child)[:200]}" for child in alive if child.is_running()]
    for child in alive:
        child.kill()
    assert not left, f"processes left behind: {left}"


def _command(process: psutil.Process) -> str:
    """Empty for one that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, so that sums are the same on every machine."""
    import torch  # not for the tests that do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
