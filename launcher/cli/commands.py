"""The commands by name. A command's module is imported only when the command runs or shows its help."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_group

_GENERAL, _SERVICES = "Commands", "Services, one process each"


class CommandEntry(NamedTuple):
    """A command's summary in the program's help, and where the command is."""

    place: str
    """The module, and in it the command's function, the group of its commands, or a `register` that adds it."""
    summary: str
    """First line of the command's own help."""
    panel: str = _GENERAL


COMMANDS = {
    "up": CommandEntry("up:register", "Start a local cluster and keep it running until Ctrl-C"),
    "demo": CommandEntry(
        "demo:demo", "Start a local cluster, stream one answer, show who served it, and stop"
    ),
    "generate": CommandEntry("client.generate:generate", "Stream one answer"),
    "status": CommandEntry("client.status:status", "Show workers and models of a running cluster"),
    "top": CommandEntry("client.top:top", "Watch a running cluster: pools, rates, latencies, slow requests"),
    "explain": CommandEntry(
        "client.explain:explain", "Show what happened to one request, and why; list slow and failed ones"
    ),
    "doctor": CommandEntry(
        "client.doctor:doctor", "Explain the lanes between workers, and this machine's part in them"
    ),
    "health": CommandEntry("client.health:health", "Exit 0 if the service at --target serves"),
    "model": CommandEntry("model:group", "Fetch and list embedded models"),
    "routes": CommandEntry("client.routes:group", "Show and change model routes: canaries and rollbacks"),
    "certs": CommandEntry("certs:certs", "Write an authority and a certificate for each role"),
    "keys": CommandEntry("keys:group", "API keys for the file of tenants"),
    "plan": CommandEntry("plan:plan", "Say whether a traffic wants split or colocated workers, and how many"),
    "simulate": CommandEntry(
        "simulate:simulate", "Replay a trace against scaling policies in simulated time"
    ),
    "coordinator": CommandEntry("services:register", "Run the coordinator", _SERVICES),
    "worker": CommandEntry("services:register", "Run a worker of any role", _SERVICES),
    "prefill-worker": CommandEntry("services:register", "Run a worker with role prefill", _SERVICES),
    "decode-worker": CommandEntry("services:register", "Run a worker with role decode", _SERVICES),
    "autoscaler": CommandEntry("services:register", "Run the autoscaler", _SERVICES),
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
        module, _, name = COMMANDS[cmd_name].place.partition(":")
        place = getattr(importlib.import_module(f"launcher.cli.{module}"), name)
        if isinstance(place, typer.Typer):
            part.add_typer(place, name=cmd_name)
        elif name == "register":
            place(part)
        else:
            part.command(cmd_name)(place)
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
