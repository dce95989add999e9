"""A Prometheus and its promtool for tests: the installed ones, else Debian's package, unpacked and not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
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
    unpacked = FOLDER / "usr/bin"
    if not (unpacked / "prometheus").exists():
        _unpack()
    return unpacked


def _unpack() -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise _missing("there is no apt-get here")
    FOLDER.mkdir(parents=True, exist_ok=True)
    why = _download()
    if why and os.geteuid() == 0:
        # A fresh container has no lists of packages.
        why = _run("apt-get", "update", "-qq") or _download()
    packages = sorted(FOLDER.glob("*.deb"))
    why = why or _run("dpkg", "--extract", str(packages[-1]), str(FOLDER))
    if why:
        raise _missing(why)


def _download() -> str:
    return _run("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", PACKAGE)


def _run(*command: str) -> str:
    """Why the command failed; empty: it did not."""
    try:
        done = subprocess.run(
            command, cwd=FOLDER, capture_output=True, text=True, timeout=FETCH_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return "" if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip()[-300:]}"


def _missing(why: str) -> UnavailableError:
    message = f"there is no Prometheus here (Debian: apt-get install prometheus): {why}"
    return UnavailableError(message, reason="NO_PROMETHEUS")
