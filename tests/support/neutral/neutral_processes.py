"""Neutral workers, and pinned ones that trade prefixes, as real processes, at a scripted registry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.cluster.processes import ServiceProcess
from tests.support.neutral.scripted_registry import ScriptedRegistry, scripted_registry

NAMES = ("a", "b")


class NeutralProcesses:
    """The workers `a` and `b`, which lean to prefill and to decode at first, or are pinned to them."""

    def __init__(
        self,
        log_dir: Path,
        registry: ScriptedRegistry,
        address: str,
        model: str,
        options: Sequence[str],
        *,
        pinned: bool = False,
    ) -> None:
        self.registry = registry
        engine = "simulated" if model == "simulated" else "torch"
        common = ["--model", model, "--engine", engine, "--threads", "1", "--coordinator", address]
        common += ["--heartbeat", "0.1", *options]
        self.members = {
            name: ServiceProcess(
                name,
                [*_kind(pool, pinned), "--worker-id", name, *common],
                log_dir,
                imports="simulated" if engine == "simulated" else "torch",
            )
            for name, pool in zip(NAMES, ("prefill", "decode"), strict=True)
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


def _kind(pool: str, pinned: bool) -> list[str]:
    return [f"{pool}-worker", "--peer-fetch", "on"] if pinned else ["worker", "--leaning", pool]


@asynccontextmanager
async def neutral_processes(
    log_dir: Path, model: str = "simulated", *options: str, own_peers: bool = False, pinned: bool = False
) -> AsyncIterator[NeutralProcesses]:
    """Two workers, connected to each other; at the end all processes have stopped. `pinned`: in place of neutral ones a
    prefill and a decode worker that trade prefixes."""
    async with scripted_registry(own_peers=own_peers) as (registry, address):
        workers = NeutralProcesses(log_dir, registry, address, model, options, pinned=pinned)
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
