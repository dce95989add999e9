"""`python -m splitserve.gpus.report`: this machine's GPUs with their kinds, NVLink and RDMA ports as one line of JSON.

The autoscaler runs it in a container on each host whose `gpus` are `auto`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from splitserve.errors import UnavailableError
from splitserve.gpus.inventory import MAX_KIND, GpuInventory
from splitserve.gpus.nvml import driver_inventory
from splitserve.gpus.rdma import read_rdma_facts


def report(library: Any = None) -> dict[str, Any]:
    """GPUs, links and RDMA ports; `error` says why no GPU can be named. `library`: see `driver_inventory`."""
    inventory, error = GpuInventory(), ""
    try:
        inventory = driver_inventory(library=library)
    except UnavailableError as refusal:
        error = refusal.message
    return {
        "gpus": list(inventory.gpus),
        "links": sorted(sorted(pair) for pair in inventory.links),
        "aliases": dict(inventory.aliases),
        "kinds": dict(inventory.kinds),
        "error": error,
        "nics": [port.name for port in read_rdma_facts().ports if port.active],
    }


def parse_report(text: str, replicas_per_gpu: int) -> tuple[GpuInventory, tuple[str, ...], str]:
    """GPUs, RDMA ports and error of a report. Raises ValueError for text that is no report."""
    try:
        facts = json.loads(text)
        links = frozenset(frozenset(map(str, pair)) for pair in facts["links"])
        gpus = tuple(map(str, facts["gpus"]))
        kinds = {str(gpu): str(kind)[:MAX_KIND] for gpu, kind in dict(facts["kinds"]).items()}
        inventory = GpuInventory(gpus, links, dict(facts["aliases"]), replicas_per_gpu, kinds)
        return inventory, tuple(map(str, facts["nics"])), str(facts["error"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a report: {error!r}") from None


def main() -> None:
    """Prints the report."""
    sys.stdout.write(json.dumps(report()) + "\n")


if __name__ == "__main__":
    main()
