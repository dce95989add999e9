"""Packages of Debian that tests need, installed where this runs as root: `python -m dev.system.debian PACKAGE ...`.

The program says so where it cannot install them; tests that need them are skipped there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path(__file__).parents[2] / "build/debian.lock"
LOCK_S = 120
FETCH_S = 300.0


def install(*packages: str) -> str:
    """Installs the packages that are missing; why that failed, or an empty text where it did not. One call runs at a
    time in all processes."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return "there is no apt-get here, or this is not root"
    # Another program, such as unattended upgrades, may hold the package manager's lock for a while.
    wait = f"DPkg::Lock::Timeout={LOCK_S}"
    command = ("apt-get", "install", "--yes", "-qq", "--no-install-recommends", "--no-upgrade", "-o", wait)
    with locked():
        # A fresh container has no lists of packages.
        return run(*command, *packages) and (run("apt-get", "update", "-qq") or run(*command, *packages))


@contextmanager
def locked() -> Iterator[None]:
    """Keeps other processes of this checkout from the package manager, which fails where two use it at once."""
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str, folder: Path | None = None) -> str:
    """Runs a command, in `folder` if given; why it failed, or an empty text where it did not."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=FETCH_S,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return "" if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip()[-300:]}"


if __name__ == "__main__":
    if why := install(*sys.argv[1:]):
        print(f"not installed: {' '.join(sys.argv[1:])}: {why}", file=sys.stderr)
