"""A Prometheus and its promtool for tests: the installed ones, else Debian's package, unpacked and not installed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from dev.system import debian
from splitserve.errors import UnavailableError

PACKAGE = "prometheus"
FOLDER = Path(__file__).parents[2] / "build/prometheus"


def prometheus_folder() -> Path:
    """The folder with `prometheus` and `promtool`.

    Raises UnavailableError (NO_PROMETHEUS) where neither is installed and apt cannot download the package.
    """
    installed = shutil.which("promtool")
    if installed and shutil.which("prometheus"):
        return Path(installed).parent
    with debian.locked():  # tests that run side by side
        if not FOLDER.exists():
            _unpack()
    return FOLDER / "usr/bin"


def _unpack() -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise _missing("there is no apt-get here")
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as name:
        here = Path(name)
        download = ("apt-get", "download", "-qq", PACKAGE)
        why = debian.run(*download, folder=here)
        if why and os.geteuid() == 0:
            # A fresh container has no lists of packages.
            why = debian.run("apt-get", "update", "-qq") or debian.run(*download, folder=here)
        if not why:
            why = debian.run("dpkg", "--extract", str(next(here.glob("*.deb"))), "unpacked", folder=here)
        if why:
            raise _missing(why)
        (here / "unpacked").rename(FOLDER)


def _missing(why: str) -> UnavailableError:
    message = f"there is no Prometheus here (Debian: apt-get install prometheus): {why}"
    return UnavailableError(message, reason="NO_PROMETHEUS")
