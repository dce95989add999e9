"""The coordinator needs no model library, and the table of commands says what the commands do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher.cli.commands import COMMANDS, CommandGroup
from tests.support.waiting import PATIENCE_S

PROGRAM = """
import sys
import coordinator.service, coordinator.entrypoints.openai.app
print(*[name for name in ("torch", "transformers") if name in sys.modules])
"""


@pytest.mark.timeout(120)
def test_the_coordinator_imports_neither_torch_nor_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.split() == []


def test_summaries_are_how_the_commands_helps_begin() -> None:
    group = CommandGroup(name="splitserve")
    for name, entry in COMMANDS.items():
        command = group.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert command.name == name
        assert command.help is not None
        assert command.help.startswith(entry.summary)


def test_a_module_registers_what_the_table_names() -> None:
    group = CommandGroup(name="splitserve")
    assert group.list_commands(None) == list(COMMANDS)  # type: ignore[arg-type]
    assert group.get_command(None, "nothing") is None  # type: ignore[arg-type]
