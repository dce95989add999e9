"""A Chromium for the tests of the page: the installed one, else Debian's package, installed where this runs as root."""

from __future__ import annotations

import shutil

from dev.system.debian import install
from splitserve.errors import UnavailableError

PROGRAM = PACKAGE = "chromium"


def chromium() -> str:
    """The path of the program.

    Raises UnavailableError (NO_CHROMIUM) where it is not installed and apt cannot install it.
    """
    path = shutil.which(PROGRAM)
    if path is None:
        # Unlike Prometheus it needs more than fifty libraries: unpacking one package does not do.
        why = install(PACKAGE, "fonts-dejavu-core")
        path = shutil.which(PROGRAM)
        if path is None:
            why = why or "the package has no such program"
            message = f"there is no Chromium here (Debian: apt-get install chromium): {why}"
            raise UnavailableError(message, reason="NO_CHROMIUM")
    return path
