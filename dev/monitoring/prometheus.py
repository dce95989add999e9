"""A Prometheus and its promtool for tests: the installed ones, else Debian's package, unpacked and not installed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from splitserve.errors import UnavailableError

PACKAGE = "prometheus"
FOLDER = Path(__file__).parents[2] / "build/prometheus"
FETCH_S = 240.0


def prometheus_folder() -> Path:
    """The folder with `prometheus` and `promtool`.

    Raises UnavailableError (NO_PROMETHEUS) where neither is installed and apt cannot download the package.
    """
    installed = shutil.which("promtool")
    if installed and shutil.which("prometheus"):
        return Path(installed).parent
    FOLDER.parent.mkdir(exist_ok=True)
    with (FOLDER.parent / "prometheus.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run side by side
        if not FOLDER.exists():
            _unpack()
    return FOLDER / "usr/bin"


def _unpack() -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise _missing("there is no apt-get here")
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as name:
        here = Path(name)
        why = _download(here)
        if why and os.geteuid() == 0:
            # A fresh container has no lists of packages.
            why = _run(here, "apt-get", "update", "-qq") or _download(here)
        if not why:
            why = _run(here, "dpkg", "--extract", str(next(here.glob("*.deb"))), "unpacked")
        if why:
            raise _missing(why)
        (here / "unpacked").rename(FOLDER)


def _download(here: Path) -> str:
    return _run(here, "apt-get", "download", "-qq", PACKAGE)


def _run(here: Path, *command: str) -> str:
    """Runs a command in that folder; why it failed, or an empty text where it did not."""
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return "" if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip()[-300:]}"


def _missing(why: str) -> UnavailableError:
    message = f"there is no Prometheus here (Debian: apt-get install prometheus): {why}"
    return UnavailableError(message, reason="NO_PROMETHEUS")
