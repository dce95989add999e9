"""What commands write to a terminal and to a pipe: progress of long work, colors, `NO_COLOR`."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
COLOR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
SIMULATE = ("simulate", "--trace", "constant", "--duration", "30", "--rate", "5")
COMMANDS = (SIMULATE, ("simulate", "--help"))

pytestmark = pytest.mark.timeout(240)


def command(arguments: tuple[str, ...]) -> tuple[str, ...]:
    return (sys.executable, "-m", "launcher", *arguments)


def on_a_terminal(arguments: tuple[str, ...], **environment: str) -> str:
    """All that the command writes where both of its outputs are a terminal."""
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    terminal = plain | {"TERM": "xterm-256color", "COLUMNS": "120"} | environment
    master, slave = pty.openpty()
    process = subprocess.Popen(command(arguments), stdout=slave, stderr=slave, cwd=ROOT, env=terminal)
    os.close(slave)
    written = bytearray()
    with open(master, "rb", buffering=0) as screen:
        while True:
            try:
                written += screen.read(65_536)
            except OSError as error:
                # Linux says so when the last process has closed its side.
                if error.errno != errno.EIO:
                    raise
                break
    process.wait(PATIENCE_S)
    return written.decode()


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_without_colors_where_no_color_is_set(arguments: tuple[str, ...]) -> None:
    assert not COLOR.search(on_a_terminal(arguments, NO_COLOR="1"))


def test_a_terminal_gets_a_bar() -> None:
    shown = on_a_terminal(SIMULATE)
    assert COLOR.search(shown)
    assert "simulate" in shown
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown


def test_a_pipe_gets_a_line_for_each_step_beside_the_result(tmp_path: Path) -> None:
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for file in files:
        file.write_text("prefill: {target_ms: 2000}\ndecode: {target_ms: 100}\n")
    arguments = command((*SIMULATE, "--policy", str(files[0]), "--policy", str(files[1]), "--json"))
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, check=True)
    assert [one["failed_requests"] for one in json.loads(done.stdout)["policies"]] == [0, 0]
    assert "\x1b" not in done.stdout
    assert done.stderr.splitlines() == ["simulate: one", "simulate: two"]
