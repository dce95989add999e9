"""Workers of role both as real processes, at a scripted registry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.cluster.processes import ServiceProcess
from tests.support.roles.scripted_registry import ScriptedRegistry, scripted_registry

NAMES = ("a", "b")


class BothProcesses:
    """The workers `a` and `b`."""

    def __init__(
        self, log_dir: Path, registry: ScriptedRegistry, address: str, model: str, options: Sequence[str]
    ) -> None:
        self.registry = registry
        engine = "simulated" if model == "simulated" else "torch"
        common = ["--model", model, "--engine", engine, "--threads", "1", "--coordinator", address]
        common += ["--heartbeat", "0.1", "--lease", "1", *options]
        self.members = {
            name: ServiceProcess(
                name,
                ["worker", "--worker-id", name, *common],
                log_dir,
                imports="simulated" if engine == "simulated" else "torch",
            )
            for name in NAMES
        }

    async def start(self) -> None:
        for member in self.members.values():
            member.start()
        self.registry.watch = self._watch
        await self.registry.until_connected(len(self.members))

    def _watch(self) -> None:
        codes = {name: member.process.poll() for name, member in self.members.items()}
        assert not [code for code in codes.values() if code not in (None, 0, -9)], f"ended: {codes}"

    def stop(self) -> dict[str, int]:
        """Ends all processes that still run; exit code by name."""
        return {name: member.terminate() for name, member in self.members.items()}


@asynccontextmanager
async def both_processes(
    log_dir: Path, model: str = "simulated", *options: str, own_peers: bool = False
) -> AsyncIterator[BothProcesses]:
    """Two workers, connected to each other; at the end all processes have stopped."""
    async with scripted_registry(own_peers=own_peers) as (registry, address):
        workers = BothProcesses(log_dir, registry, address, model, options)
        try:
            await workers.start()
            yield workers
        except BaseException:
            for member in workers.members.values():
                if member.log_path.exists():
                    print(f"--- {member.name}\n{member.log_tail(60)}")
            raise
        finally:
            workers.stop()
