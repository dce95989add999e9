"""Conversions that need torch or `transformers`, each in a child process: the calling process imports neither."""

from __future__ import annotations

import os
import subprocess

from splitserve.runtime.child_launch import python_module

_QUIET = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def run_conversion(module: str, *arguments: str, timeout_s: float | None = None) -> tuple[int, str]:
    """Runs a module to its end; returns its exit code, and the last line that it wrote, which says why it failed.

    Raises OSError and subprocess.TimeoutExpired.
    """
    done = subprocess.run(
        [*python_module(module), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | _QUIET,
        timeout=timeout_s,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    return done.returncode, lines[-1] if lines else f"the process ended with status {done.returncode}"
