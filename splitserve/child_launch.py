"""Becomes another program that ends with its parent: `python child_launch.py PARENT_PID PROGRAM [ARGUMENT ...]`.

Linux sends the signal asked for with prctl(PR_SET_PDEATHSIG) when the parent dies, even by SIGKILL, and keeps
the request across exec. Asking here, after the fork and before the exec, needs no code between fork and exec
in the parent, which would not be safe there: it has threads. Only the standard library is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Never returns: it ends, or becomes the program."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have died before the request was made.
        if os.getppid() != parent:
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
