"""The commands by name. A command's module is imported only when the command runs or shows its help."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
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
    "up": CommandEntry("splitserve.cli.up", "Start a local cluster and keep it running until Ctrl-C"),
    "generate": CommandEntry("splitserve.cli.client.generate", "Stream one answer"),
    "status": CommandEntry("splitserve.cli.client.status", "Show workers and models of a running cluster"),
    "top": CommandEntry(
        "splitserve.cli.client.top", "Watch a running cluster: pools, rates, latencies, slow requests"
    ),
    "explain": CommandEntry(
        "splitserve.cli.client.explain",
        "Show what happened to one request, and why; list slow and failed ones",
    ),
    "doctor": CommandEntry(
        "splitserve.cli.client.doctor", "Explain the lanes between workers, and this machine's part in them"
    ),
    "health": CommandEntry("splitserve.cli.client.health", "Exit 0 if the service at --target serves"),
    "model": CommandEntry("splitserve.cli.model", "Fetch and list embedded models"),
    "routes": CommandEntry(
        "splitserve.cli.client.routes", "Show and change model routes: canaries and rollbacks"
    ),
    "certs": CommandEntry("splitserve.cli.certs", "Write an authority and a certificate for each role"),
    "keys": CommandEntry("splitserve.cli.keys", "API keys for the file of tenants"),
    "record": CommandEntry(
        "splitserve.cli.advisor.record",
        "Record the traffic of a running cluster: lengths, times, prefix hashes; no content",
    ),
    "advise": CommandEntry(
        "splitserve.cli.advisor.advise", "Say which split of the workers a recorded traffic asks for, and why"
    ),
    "plan": CommandEntry(
        "splitserve.cli.advisor.plan",
        "Say how many GPUs a traffic needs for each pool, and colocated, before you buy them",
    ),
    "simulate": CommandEntry(
        "splitserve.cli.simulation.simulate", "Replay a trace against a scaling policy in simulated time"
    ),
    "coordinator": CommandEntry("splitserve.cli.services", "Run the coordinator", _SERVICES),
    "prefill-worker": CommandEntry("splitserve.cli.services", "Run a prefill worker", _SERVICES),
    "worker": CommandEntry("splitserve.cli.services", "Run a neutral worker", _SERVICES),
    "decode-worker": CommandEntry("splitserve.cli.services", "Run a decode worker", _SERVICES),
    "autoscaler": CommandEntry("splitserve.cli.services", "Run the autoscaler", _SERVICES),
}


class _LazyCommands(MutableMapping[str, Any]):
    """`COMMANDS`, each built on first use."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = _build(name)
        return self._built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._built[name] = command

    def __delitem__(self, name: str) -> None:
        del self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _build(name: str) -> Any:
    part = typer.Typer()
    part.callback()(lambda: None)  # keeps a single command a group of one
    importlib.import_module(COMMANDS[name].module).register(part)
    return get_group(part).commands[name]


class CommandGroup(TyperGroup):
    """The program. Its help is plain text from `COMMANDS`: rendering it with rich would take 0.2 s of CPU."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _LazyCommands()

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
