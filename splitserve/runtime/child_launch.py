"""Executes a program that ends with its parent: `python launch.py PARENT_PID PROGRAM [ARGUMENT ...]`.

With prctl(PR_SET_PDEATHSIG) Linux sends a signal when the parent dies, even by SIGKILL; the setting survives exec. This
program makes the setting after fork, in place of a preexec function, which would be unsafe in a parent with threads.
Imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def python_module(name: str) -> tuple[str, ...]:
    """The words that run one of splitserve's modules. Python would look for it in the working folder first, where a
    user's own `worker` or `engine` may lie, so it is told not to, unless that folder is a clone of splitserve."""
    ours = os.path.realpath(__file__).removesuffix("splitserve/runtime/child_launch.py")
    there = os.path.exists(ours) and os.path.exists(".") and os.path.samefile(ours, ".")
    return (sys.executable, *(() if there else ("-P",)), "-m", name)


PROGRAM = python_module("launcher")
"""The words of each service's command before its arguments."""


def launcher() -> list[str]:
    """The words to put before a command that is to end with this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def main(arguments: list[str]) -> None:
    """Executes the program; never returns."""
    parent, command = int(arguments[0]), arguments[1:]
    end_with_parent(parent)
    os.execvp(command[0], command)


def end_with_parent(parent: int) -> None:
    """Lets Linux kill this process when its parent dies. Ends it now if `parent` is not its parent any more."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call.
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
