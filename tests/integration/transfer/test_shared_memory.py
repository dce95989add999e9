"""Workers where the shared memory is small, each in a mount namespace of its own with another /dev/shm."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * LEAST_TIMEOUT_S)]

MOUNT = 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"'
WORKER = ("prefill-worker", "--engine", "simulated", "--model", "simulated", "--coordinator", "127.0.0.1:1")


def within(size: str, *command: str) -> list[str]:
    return ["unshare", "--mount", "bash", "-c", MOUNT, size, *command]


def require_namespaces() -> None:
    tried = subprocess.run(within("1m", "true"), capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespace: {tried.stderr.strip()}")


def log_until_ready(size: str, transport: str) -> list[str]:
    """The lines that a worker logs until it is ready; it is told to end then, and must do so by itself."""
    command = within(size, sys.executable, "-m", "launcher", *WORKER, "--transport", transport)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as worker:
        assert worker.stdout is not None
        lines: list[str] = []
        try:
            for line in worker.stdout:
                lines.append(line)
                if '"worker.ready"' in line:
                    return lines
        finally:
            worker.terminate()
            worker.communicate(timeout=PATIENCE_S)
    raise AssertionError(f"it ended with {worker.returncode}: {''.join(lines[-5:])}")


@pytest.mark.parametrize("size", ["1m", "16384k", "16400k", "20m"])
def test_a_worker_starts_and_says_what_there_is_and_what_is_needed(size: str) -> None:
    """UCX ended the process where 16 MiB were free, and at no other size."""
    require_namespaces()
    (told,) = [line for line in log_until_ready(size, "nixl") if "shared_memory_small" in line]
    assert "MiB free, and UCX needs 64 MiB there" in told


def test_with_enough_nothing_is_said() -> None:
    require_namespaces()
    assert not any("shared_memory_small" in line for line in log_until_ready("80m", "nixl"))
