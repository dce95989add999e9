"""When a local cluster lends cores by default, and the file for it, which leaves nothing behind."""

from __future__ import annotations

import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.backends.cpu.core_exchange import CoreExchange
from splitserve.cluster.lent_cores import lends_by_default, shared_core_file
from splitserve.cluster.placement import make_inventory
from splitserve.cluster.process_specs import cluster_specs, worker_count
from splitserve.config.base import load_settings
from splitserve.config.cluster import ClusterConfig
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import ConfigError
from splitserve.gpus.inventory import GpuInventory

FRONT = CoordinatorConfig(grpc_port=4000)


def lends(cores: list[int], gpus: GpuInventory | None = None, **settings: Any) -> bool:
    config = load_settings(ClusterConfig, None, **settings)
    pinned = make_inventory(cores, worker_count(config), pin_cores=config.pin_cores, gpus=gpus)
    return lends_by_default(config, pinned)


def test_workers_with_cores_of_their_own_lend_them() -> None:
    assert lends([0, 1])
    assert lends([0, 1, 2, 3, 4])
    assert lends([0, 1], workers=2)
    assert lends([0, 1, 2], prefill=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"lend_cores": False},
        {"pin_cores": False},
        {"prefill": 2},  # three workers on two cores
        {"autoscale": "policy.yaml"},
        {"engine": {"kind": "simulated"}},
        {"engine": {"kind": "vllm"}},
        {"engine": {"device": "cuda"}},
        {"engine": {"core_exchange": "/dev/shm/named"}},
    ],
)
def test_where_that_makes_no_sense_they_do_not(settings: dict[str, Any]) -> None:
    assert not lends([0, 1], **settings)


def test_workers_on_gpus_lend_nothing() -> None:
    assert not lends([0, 1], GpuInventory.of_groups([["0", "1"]]))


def options_of(config: ClusterConfig) -> list[str | None]:
    commands = [spec.command for spec in cluster_specs(config, [0, 1])[1:]]
    return [dict(pairwise(command)).get("--core-exchange") for command in commands]


def test_a_named_file_is_used_and_off_is_off() -> None:
    named = load_settings(ClusterConfig, None, engine={"core_exchange": "/x/cores"}, coordinator=FRONT)
    assert options_of(named) == ["/x/cores"] * 2
    assert options_of(named.model_copy(update={"lend_cores": False})) == [None] * 2


def test_two_clusters_have_files_that_never_meet_and_are_gone_at_the_end() -> None:
    config = ClusterConfig(coordinator=FRONT)
    cores = make_inventory([0, 1], 2, pin_cores=True)
    before = set(os.listdir("/proc/self/fd"))
    with shared_core_file(config, cores) as (first, files), shared_core_file(config, cores) as (second, more):
        (path,) = set(options_of(first))
        assert path == f"/proc/self/fd/{files[0]}" != f"/proc/self/fd/{more[0]}"
        found = os.fstat(files[0])
        assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o600, 0)
        exchanges = [CoreExchange(Path(path), [number]) for number in (0, 1)]
        (other,) = set(options_of(second))
        assert other is not None
        stranger = CoreExchange(Path(other), [0])
        borrowed = exchanges[0].borrow()
        assert borrowed.cores == (1,)
        assert exchanges[1].demand() is not None
        assert stranger.borrow().cores == ()
        exchanges[1].close()  # as its end does; its slot is free for the next one
        exchanges[0].give_back(borrowed)
        exchanges[1] = CoreExchange(Path(path), [1])
        assert exchanges[0].borrow().cores == (1,)
        for exchange in (*exchanges, stranger):
            exchange.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_system_without_such_files_or_locks_lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ClusterConfig(coordinator=FRONT)
    cores = make_inventory([0, 1], 2, pin_cores=True)

    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    before = set(os.listdir("/proc/self/fd"))
    for function in ("fcntl.fcntl", "os.memfd_create"):
        with monkeypatch.context() as changed:
            changed.setattr(function, refuse)
            with shared_core_file(config, cores) as (left, files):
                assert (left, files) == (config, ())
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_in_which_nothing_can_be_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    with pytest.raises(ConfigError, match="cannot use") as refused:
        CoreExchange(tmp_path / "cores", [0])
    assert refused.value.field == "engine.core_exchange"
