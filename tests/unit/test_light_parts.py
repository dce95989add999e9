"""What coordinator, autoscaler and command line cost before they do anything."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from splitserve.cli.commands import COMMANDS, CommandGroup
from tests.support.waiting import PATIENCE_S

HEAVY = ("torch", "transformers", "huggingface_hub", "accelerate", "gguf", "safetensors", "opentelemetry")
HELP_CPU_S = 0.3
PROGRAM = """
import sys
from splitserve.cli.main import main
{body}
print([name for name in {heavy} if name in sys.modules])
"""


def loaded_heavy(body: str) -> str:
    """Which heavy libraries a Python process has imported after running some lines; its last line of output."""
    program = PROGRAM.format(body=body, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.timeout(120)
def test_services_import_no_heavy_library() -> None:
    assert loaded_heavy("import coordinator.service, autoscaler.service, splitserve.client") == "[]"


@pytest.mark.timeout(120)
def test_no_help_imports_a_heavy_library() -> None:
    shown = [[name, "--help"] for name in COMMANDS] + [["--help"], ["--version"], []]
    assert loaded_heavy(f"for arguments in {shown}: assert main(arguments) in (0, 2)") == "[]"


def test_the_help_takes_little_time() -> None:
    bare_s = cpu_s("-c", "pass")  # 10 to 20 ms; more where the machine is slow
    assert cpu_s("-m", "splitserve", "--help") < max(HELP_CPU_S, 20 * bare_s)


def cpu_s(*arguments: str) -> float:
    """CPU seconds of a Python process. The least of some runs: it varies with what else the machine does."""
    used = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(used)


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
