"""`python -m splitserve.gpus.report`: this machine's GPUs with their kinds, NVLink and RDMA ports as one line of JSON.

The autoscaler runs it in a container on each host whose `gpus` are `auto`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from splitserve.errors import UnavailableError
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.kinds import MAX_KIND
from splitserve.gpus.nvml import NvmlLibrary, driver_inventory
from splitserve.gpus.rdma import read_rdma_facts


def report(library: NvmlLibrary | None = None) -> dict[str, Any]:
    """What is there; `error` says why no GPU can be named."""
    found: dict[str, Any] = {"gpus": [], "links": [], "aliases": {}, "kinds": {}, "error": ""}
    try:
        inventory = driver_inventory(library=library)
    except UnavailableError as error:
        found["error"] = error.message
    else:
        found["gpus"] = list(inventory.gpus)
        found["links"] = sorted(sorted(pair) for pair in inventory.links)
        found["aliases"] = dict(inventory.aliases)
        found["kinds"] = dict(inventory.kinds)
    found["nics"] = [port.name for port in read_rdma_facts().ports if port.active]
    return found


def parse_report(text: str, replicas_per_gpu: int) -> tuple[GpuInventory, tuple[str, ...], str]:
    """GPUs, RDMA ports and error of a report. Raises ValueError for text that is none."""
    try:
        found = json.loads(text)
        links = frozenset(frozenset(map(str, pair)) for pair in found["links"])
        gpus = tuple(map(str, found["gpus"]))
        told = found.get("kinds", {})  # images of before have none
        kinds = {gpu: str(told[gpu])[:MAX_KIND] for gpu in gpus if gpu in told}
        inventory = GpuInventory(gpus, links, dict(found["aliases"]), replicas_per_gpu, kinds)
        return inventory, tuple(map(str, found["nics"])), str(found["error"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a report: {error!r}") from None


def main() -> None:
    """Prints the report."""
    sys.stdout.write(json.dumps(report()) + "\n")


if __name__ == "__main__":
    main()
