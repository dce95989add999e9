"""A worker whose disk tier writes nothing until a named pipe has a writer: `python -m tests.support.tiers.gated_disk
COMMAND ... PIPE`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from engine.tiers.stores.disk_store import DiskStore
from engine.tiers.tier_index import TierBlock
from splitserve.cli.main import main


def gate_writes(pipe: Path) -> None:
    opened, write = threading.Event(), DiskStore.write

    def gated(self: DiskStore, slot: int, block: TierBlock, content: memoryview) -> None:
        if not opened.is_set():
            with pipe.open():
                opened.set()
        write(self, slot, block, content)

    DiskStore.write = gated  # type: ignore[method-assign]


if __name__ == "__main__":
    gate_writes(Path(sys.argv.pop()))
    sys.exit(main())
