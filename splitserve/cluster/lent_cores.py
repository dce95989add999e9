"""The file by which the workers of a local cluster lend each other cores where nobody names one.

It lies in memory and has no name. Workers inherit it and open it anew, because the locks in it belong to whoever opened
it. So the files of two clusters cannot meet, and nothing is left when the last process has ended, in whatever way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from splitserve.cluster.placement import Inventory
from splitserve.config.cluster import ClusterConfig
from splitserve.config.engine import INHERITED_FILES
from splitserve.logs import log_event
from splitserve.runtime.byte_locks import is_locked


def lends_by_default(config: ClusterConfig, inventory: Inventory) -> bool:
    """Whether workers in these places share a file that nobody named: those of the own engine on cpu, each pinned to
    cores of its own, their number fixed."""
    cores = [core for share in inventory.shares for core in share.cpus]
    own = bool(cores) and len(set(cores)) == len(cores)
    on_cpu = config.engine.kind == "torch" and config.engine.device != "cuda" and not inventory.gpus.gpus
    return (
        config.lend_cores
        and config.engine.core_exchange is None
        and config.autoscale is None
        and own
        and on_cpu
    )


@contextmanager
def shared_core_file(
    config: ClusterConfig, inventory: Inventory
) -> Iterator[tuple[ClusterConfig, tuple[int, ...]]]:
    """The workers' settings, with a file where they lend cores by default, and what they inherit for that."""
    file = None
    if lends_by_default(config, inventory):
        try:
            file = _new_file()
        except OSError as error:
            log_event("cluster.no_lent_cores", level=logging.WARNING, why=str(error))
    if file is None:
        yield config, ()
        return
    try:
        engine = config.engine.model_copy(update={"core_exchange": INHERITED_FILES / str(file)})
        yield config.model_copy(update={"engine": engine}), (file,)
    finally:
        os.close(file)


def _new_file() -> int:
    """A file that children may inherit. Raises OSError where the system has no such files, or no locks in them."""
    file = os.memfd_create("splitserve-cores")
    try:
        os.fchmod(file, 0o600)
        with (INHERITED_FILES / str(file)).open("rb+", buffering=0) as again:  # as a worker does
            is_locked(again.fileno(), 0)
    except BaseException:
        os.close(file)
        raise
    return file
