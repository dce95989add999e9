"""The commands by name. A command's module is imported only when the command runs or shows its help."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_group

_GENERAL, _SERVICES = "Commands", "Services, one process each"


class CommandEntry(NamedTuple):
    """A command's summary in the program's help, and the module whose `register` adds it."""

    module: str
    summary: str
    """First line of the command's own help."""
    panel: str = _GENERAL


COMMANDS = {
    "up": CommandEntry("launcher.cli.up", "Start a local cluster and keep it running until Ctrl-C"),
    "generate": CommandEntry("launcher.cli.client.generate", "Stream one answer"),
    "status": CommandEntry("launcher.cli.client.status", "Show workers and models of a running cluster"),
    "top": CommandEntry(
        "launcher.cli.client.top", "Watch a running cluster: pools, rates, latencies, slow requests"
    ),
    "explain": CommandEntry(
        "launcher.cli.client.explain",
        "Show what happened to one request, and why; list slow and failed ones",
    ),
    "doctor": CommandEntry(
        "launcher.cli.client.doctor", "Explain the lanes between workers, and this machine's part in them"
    ),
    "health": CommandEntry("launcher.cli.client.health", "Exit 0 if the service at --target serves"),
    "model": CommandEntry("launcher.cli.model", "Fetch and list embedded models"),
    "routes": CommandEntry(
        "launcher.cli.client.routes", "Show and change model routes: canaries and rollbacks"
    ),
    "certs": CommandEntry("launcher.cli.certs", "Write an authority and a certificate for each role"),
    "keys": CommandEntry("launcher.cli.keys", "API keys for the file of tenants"),
    "plan": CommandEntry(
        "launcher.cli.plan", "Say whether a traffic wants split or colocated workers, and how many"
    ),
    "simulate": CommandEntry(
        "launcher.cli.simulate", "Replay a trace against scaling policies in simulated time"
    ),
    "coordinator": CommandEntry("launcher.cli.services", "Run the coordinator", _SERVICES),
    "worker": CommandEntry("launcher.cli.services", "Run a worker of any role", _SERVICES),
    "prefill-worker": CommandEntry("launcher.cli.services", "Run a worker with role prefill", _SERVICES),
    "decode-worker": CommandEntry("launcher.cli.services", "Run a worker with role decode", _SERVICES),
    "autoscaler": CommandEntry("launcher.cli.services", "Run the autoscaler", _SERVICES),
}


class CommandGroup(TyperGroup):
    """The program. Its help is plain text from `COMMANDS`: rendering it with rich would take 0.2 s of CPU."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names  # for suggestions after a wrong name

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Imports the command's module; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        part = typer.Typer(rich_markup_mode=None)
        part.callback()(lambda: None)  # keeps a single command a group of one
        importlib.import_module(COMMANDS[cmd_name].module).register(part)
        return get_group(part).commands[cmd_name]

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a table of names and summaries for each panel."""
        width = max(map(len, COMMANDS))
        for panel in dict.fromkeys(entry.panel for entry in COMMANDS.values()):
            rows = [(name, entry.summary) for name, entry in COMMANDS.items() if entry.panel == panel]
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in rows])
