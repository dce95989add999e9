"""A Chromium for the tests of the page: the installed one, else Debian's package, installed where this runs as root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from splitserve.errors import UnavailableError

PROGRAM = PACKAGE = "chromium"
LOCK = Path(__file__).parents[1] / "build/chromium.lock"
FETCH_S = 240.0
INSTALL = ("apt-get", "install", "--yes", "-qq", "--no-install-recommends", PACKAGE, "fonts-dejavu-core")


def chromium() -> str:
    """The path of the program.

    Raises UnavailableError (NO_CHROMIUM) where it is not installed and apt cannot install it.
    """
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run side by side
        found = shutil.which(PROGRAM)
        if found is None:
            # Unlike Prometheus it needs more than fifty libraries: unpacking one package does not do.
            _install()
            found = shutil.which(PROGRAM)
    if found is None:
        raise _missing("the package has no such program")
    return found


def _install() -> None:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise _missing("there is no apt-get here, or this is not root")
    # A fresh container has no lists of packages.
    why = _run(*INSTALL) and (_run("apt-get", "update", "-qq") or _run(*INSTALL))
    if why:
        raise _missing(why)


def _run(*command: str) -> str:
    """Why the command failed; empty: it did not."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FETCH_S, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return "" if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip()[-300:]}"


def _missing(why: str) -> UnavailableError:
    message = f"there is no Chromium here (Debian: apt-get install chromium): {why}"
    return UnavailableError(message, reason="NO_CHROMIUM")
