"""`splitserve demo`: what it starts ends with it, also where its own output breaks."""

from __future__ import annotations

import sys
import threading

import pytest

from launcher.cli import demo, output
from tests.support.waiting import PATIENCE_S

ENDLESS = "import time; print('a word', flush=True); time.sleep(600)"


def test_a_broken_output_leaves_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(demo, "PROGRAM", (sys.executable, "-c", ENDLESS))
    monkeypatch.setattr(output, "write", broken)
    before = set(threading.enumerate())
    with pytest.raises(BrokenPipeError):
        demo._shown()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
