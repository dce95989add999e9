"""What `make docs-check` runs: each command that README.md and the pages of docs/ name, once, in a clean clone.

`dev/docs/plan.py` says in which form. Options that the docs name are compared with those that the programs have.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from dev.docs.clean_clone import ROOT, CheckError, CleanClone, uncommitted
from dev.docs.commands import DocCommand, commands_of, pages
from dev.docs.flags import wrong_alone, wrong_flags
from dev.docs.plan import SCENES, SHORT, Scene, fate_of, unused

COMMAND_S = 600.0
BENCH = "python -m bench."


def all_commands(root: Path = ROOT) -> list[DocCommand]:
    """The commands of all pages."""
    return [
        command
        for page in pages(root)
        for command in commands_of(page.name, page.read_text(encoding="utf-8"))
    ]


def mistakes(commands: Sequence[DocCommand], root: Path = ROOT) -> list[str]:
    """Static findings, one line each: nothing is run."""
    findings = [f"{command}: nobody says how to run it" for command in commands if fate_of(command) is None]
    findings += [
        f"dev/docs/plan.py: no command of the docs is {entry!r}" for entry in sorted(unused(commands))
    ]
    for command in commands:
        findings += wrong_flags(command)
    return findings + wrong_alone(root, commands)


class Check:
    """Runs commands and records failures."""

    def __init__(self, clone: CleanClone) -> None:
        self._clone = clone
        self.failed = 0

    def scene(self, scene: Scene) -> None:
        """Starts the servers of a scene, runs its commands against them, and ends them."""
        print(f"-- {scene.name}", flush=True)
        for text, form in scene.before.items():
            self._run(form.replace("{}", text))
        with ExitStack() as stack:
            try:
                for text, form in scene.servers.items():
                    command = self._clone.localized(form.replace("{}", text) + " ")
                    began = time.monotonic()
                    stack.enter_context(self._clone.serving(command))
                    self._tell(began, command)
                for text, form in scene.clients.items():
                    self._run(form.replace("{}", text))
                stack.close()
            except CheckError as error:
                self._fail(scene.name, error)

    def alone(self, command: str) -> None:
        """Runs a command that needs no server."""
        self._run(command)

    def _run(self, command: str) -> None:
        command, began = self._clone.localized(command), time.monotonic()
        try:
            self._clone.run(command, COMMAND_S)
        except CheckError as error:
            self._fail(command, error)
        else:
            self._tell(began, command)

    def _tell(self, began: float, command: str) -> None:
        print(f"ok {time.monotonic() - began:6.1f} s  {command}", flush=True)

    def _fail(self, what: str, error: CheckError) -> None:
        self.failed += 1
        print(f"FAILED        {what}: {error}", flush=True)


def main() -> int:
    """Exit code 0 only if every command is known and those runnable here succeeded."""
    parser = argparse.ArgumentParser(prog="python -m dev.docs.check", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="without the bench commands")
    parser.add_argument("--only", help="only scenes and commands with this in their name")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers and removes the clone
    began, commands = time.monotonic(), all_commands()
    findings = mistakes(commands)
    for finding in findings:
        print(finding)
    for name, why in sorted(
        {(fate.entry, fate.why_not) for fate in map(fate_of, commands) if fate and fate.why_not}
    ):
        if name:
            print(f"not run: {name}: {why}")
    if uncommitted():
        print("note: what is not committed is not in the clone")
    wanted = options.only or ""
    with tempfile.TemporaryDirectory(prefix="splitserve-docs-") as folder:
        check = Check(CleanClone(Path(folder).resolve() / "clone"))
        for scene in SCENES:
            if wanted in scene.name:
                check.scene(scene)
        for command in SHORT.values():
            if wanted in command and not (options.quick and command.startswith(BENCH)):
                check.alone(command)
    failed = check.failed + len(findings)
    print(f"docs-check: {'ok' if not failed else f'{failed} FAILED'}, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
