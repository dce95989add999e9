"""Placement of local workers on cores and GPUs: cores without overlap and evenly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.actuators.actuator import ReplicaShape
from bench.cluster import cluster_specs
from launcher.cluster import placement
from launcher.cluster.child_process import ChildSpec
from launcher.cluster.placement import (
    CoreShare,
    Inventory,
    Place,
    layout_cores,
    machine_gpus,
    make_inventory,
    unpinned_cores,
    with_default_engine,
)
from launcher.cluster.process_specs import worker_specs
from splitserve.config.cluster import ClusterConfig
from splitserve.config.engine import EngineConfig
from splitserve.core_list import format_cores, parse_cores
from splitserve.errors import (
    ConfigError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from splitserve.gpus.inventory import GpuInventory
from splitserve.host_facts import read_host_facts

TWO = GpuInventory.of_groups([["0", "1"]])
EIGHT = GpuInventory.of_groups([["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]])


def inventory(workers: int = 4, gpus: GpuInventory | None = TWO) -> Inventory:
    return make_inventory([0, 1, 2, 3], workers, pin_cores=True, gpus=gpus)


def test_workers_have_cores_and_gpus_of_their_own() -> None:
    machine = inventory()
    assert [machine.take(name, "decode").gpus for name in "ab"] == [("0",), ("1",)]
    with pytest.raises(ResourceExhaustedError, match="none of the 2 GPUs is free") as caught:
        machine.take("c", "decode")
    assert caught.value.reason == "NO_GPU"
    assert machine.place_of("c") is None
    machine.release_except({"b"})
    assert machine.take("c", "prefill").gpus == ("0",)
    assert sorted(cpu for name in "bc" for cpu in machine.place_of(name).share.cpus) == [0, 1]  # type: ignore[union-attr]


def test_without_gpus_the_settings_decide() -> None:
    assert inventory(gpus=None).take("a", "decode", ReplicaShape(2)).gpus is None


def test_more_workers_than_shares_take_turns() -> None:
    machine = inventory(workers=2, gpus=None)
    assert [machine.take(name, "decode").share.cpus for name in "abc"] == [(0, 1), (2, 3), (0, 1)]


def test_a_freed_share_is_taken_again() -> None:
    machine = inventory(gpus=None)
    for name in "abc":
        machine.take(name, "decode")
    machine.release("b")
    assert machine.take("d", "decode").share.cpus == (1,)


def options(config: ClusterConfig, gpus: GpuInventory, flag: str) -> list[str | None]:
    """A worker option's value on each worker's command line."""
    commands = [spec.command for spec in cluster_specs(config, [0, 1, 2], gpus=gpus)[1:]]
    return [words[words.index(flag) + 1] if flag in words else None for words in commands]


def test_up_gives_each_worker_its_gpus() -> None:
    config = ClusterConfig(prefill=2, decode=3, decode_gpus=2, engine=EngineConfig(kind="vllm"))
    assert options(config, EIGHT, "--gpus") == ["0", "1", "2,3", "4,5", "6,7"]
    specs = cluster_specs(config, [0, 1, 2, 3, 4], gpus=EIGHT)
    assert specs[3].layout == "cores 2, 1 thread, GPU 2,3"


def test_workers_share_gpus_where_that_is_asked_for() -> None:
    shared = GpuInventory.of_groups([["0"]], replicas_per_gpu=2)
    config = ClusterConfig(replicas_per_gpu=2)
    assert options(config, shared, "--gpus") == ["0", "0"]
    assert options(config, shared, "--device-memory-share") == ["0.45", "0.45"]
    with pytest.raises(ResourceExhaustedError, match="--replicas-per-gpu") as caught:
        cluster_specs(ClusterConfig(), [0, 1], gpus=GpuInventory.of_groups([["0"]]))
    assert (
        "decode-0: none of the 1 GPUs is free; 1 prefill and 1 decode workers take 2" in caught.value.message
    )


def test_a_pool_without_gpus_computes_on_cpu() -> None:
    config = ClusterConfig(prefill_gpus=0)
    assert options(config, TWO, "--gpus") == [None, "0"]
    assert options(config, TWO, "--device") == ["cpu", None]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (
            EngineConfig(kind="vllm", engine_args="-tp 4"),
            "decode_gpus is 2, but engine.engine_args ask for 4 ranks",
        ),
        (EngineConfig(), "decode_gpus is 2, but the torch engine computes on one GPU"),
    ],
)
def test_a_size_that_differs_from_the_gpus_is_an_error(engine: EngineConfig, words: str) -> None:
    prefill = 4 if engine.kind == "vllm" else 1
    with pytest.raises(ConfigError, match=words) as caught:
        cluster_specs(ClusterConfig(prefill_gpus=prefill, decode_gpus=2, engine=engine), [0], gpus=EIGHT)
    assert caught.value.field == "decode_gpus"


@pytest.mark.parametrize(("kind", "device"), [("simulated", "auto"), ("torch", "cpu"), ("torch", "cuda:1")])
def test_no_gpus_are_looked_for_where_none_are_to_be_chosen(kind: str, device: str) -> None:
    assert machine_gpus(kind, device).gpus == ()


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = placement.read_host_facts()
    monkeypatch.setattr(placement, "read_host_facts", lambda: facts)
    object.__setattr__(facts, "gpus", 4)
    monkeypatch.setattr(placement, "_usable_gpus", lambda: 4)
    groups = [["0", "1"], ["2", "3"]]
    monkeypatch.setattr(placement, "driver_inventory", lambda per: GpuInventory.of_groups(groups, per))


@pytest.mark.usefixtures("four_gpus")
def test_the_machines_gpus_are_those_in_view() -> None:
    assert machine_gpus("torch", "auto", 2, {}).capacity == 8
    part = machine_gpus("vllm", "cuda", 1, {"CUDA_VISIBLE_DEVICES": "3,2,0"})
    assert part.gpus == ("3", "2", "0")
    assert part.links == {frozenset(("2", "3"))}
    assert machine_gpus("torch", "auto", 1, {"CUDA_VISIBLE_DEVICES": ""}).gpus == ()


@pytest.mark.usefixtures("four_gpus")
def test_vllm_computes_on_gpus_where_it_is_installed_and_no_engine_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, named = ClusterConfig(model="m"), ClusterConfig(model="m", engine=EngineConfig(kind="torch"))
    assert with_default_engine(plain).engine.kind == "torch"  # vLLM is not here
    monkeypatch.setattr(placement, "find_spec", lambda name: name)
    assert with_default_engine(plain).engine.kind == "vllm"
    assert with_default_engine(ClusterConfig(model="m", workers=2)).engine.kind == "vllm"
    for config in (
        named,
        ClusterConfig(model="m", engine=EngineConfig(device="cpu")),
        ClusterConfig(model="simulated"),
    ):
        assert with_default_engine(config) is config
    monkeypatch.setattr(placement, "read_host_facts", lambda: replace(read_host_facts(), gpus=0))
    assert with_default_engine(plain) is plain


@pytest.mark.usefixtures("four_gpus")
def test_without_nvml_all_gpus_are_equally_near(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> GpuInventory:
        raise UnavailableError("no package", reason="NO_NVML")

    monkeypatch.setattr(placement, "driver_inventory", refuse)
    assert machine_gpus("torch", "auto", 1, {}).gpus == ("0", "1", "2", "3")
    assert machine_gpus("torch", "auto", 1, {"CUDA_VISIBLE_DEVICES": "2,1"}).gpus == ("2", "1")


def test_the_first_workers_get_gpus_of_the_kind_of_their_class() -> None:
    gpus = GpuInventory.listed("H100=0,1;L40S=2,3")
    made: dict[str, tuple[str, ...] | None] = {}

    def make(pool: str, name: str, place: Place) -> ChildSpec:
        made[name] = place.gpus
        return ChildSpec(name, "prefill", ())

    where = make_inventory([0], 4, pin_cores=False, gpus=gpus)
    worker_specs(
        ClusterConfig(),
        where,
        make,
        {"prefill-0": ReplicaShape(1, "L40S"), "decode-0": ReplicaShape(1, "H100")},
    )
    assert made == {"prefill-0": ("2",), "decode-0": ("0",)}
    with pytest.raises(FailedPreconditionError) as caught:
        worker_specs(ClusterConfig(), inventory(), make, {"prefill-0": ReplicaShape(1, "L40S")})
    assert caught.value.field == "gpu"
    worker_specs(
        ClusterConfig(), inventory(gpus=GpuInventory()), make, {"prefill-0": ReplicaShape(1, "L40S")}
    )


CORES = st.lists(st.integers(0, 300), min_size=1, max_size=64, unique=True)


@pytest.mark.parametrize(
    ("cores", "workers", "expected"),
    [
        ([0], 2, [(0,), (0,)]),
        ([0, 1], 2, [(0,), (1,)]),
        ([2, 5], 3, [(2,), (5,), (2,)]),
        ([0, 1, 2], 2, [(0, 1), (2,)]),
        ([0, 1, 2, 3], 2, [(0, 1), (2, 3)]),
        ([0, 1, 2, 3, 4], 2, [(0, 1), (2, 3)]),
        (list(range(16)), 2, [tuple(range(7)), tuple(range(7, 14))]),
        (list(range(9)), 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ],
)
def test_known_layouts(cores: list[int], workers: int, expected: list[tuple[int, ...]]) -> None:
    assert layout_cores(cores, workers) == [CoreShare(cpus, len(cpus)) for cpus in expected]


@given(CORES, st.integers(1, 80))
def test_layouts_hold_their_promises(cores: list[int], workers: int) -> None:
    shares = layout_cores(cores, workers)
    used = [cpu for share in shares for cpu in share.cpus]
    sizes = {len(share.cpus) for share in shares}
    assert len(shares) == workers
    assert set(used) <= set(cores)
    assert all(share.cpus and share.threads == len(share.cpus) for share in shares)
    assert max(sizes) - min(sizes) <= 1
    if workers <= len(cores):
        assert len(set(used)) == len(used)
    if len(cores) > 2 * workers:
        assert len(used) < len(cores)
        assert len(sizes) == 1
    else:
        assert set(used) == set(cores)


def test_unpinned_workers_share_the_threads() -> None:
    assert unpinned_cores([0, 1, 2, 3, 4], 2) == [CoreShare((), 2)] * 2
    assert unpinned_cores([0], 3) == [CoreShare((), 1)] * 3


@given(CORES)
def test_cores_are_read_as_written(cores: list[int]) -> None:
    assert parse_cores(format_cores(cores)) == tuple(sorted(cores))


def test_cores_are_written_shortly() -> None:
    assert format_cores([3, 0, 1, 2, 6]) == "0-3,6"
    assert parse_cores("0, 1,4-6") == (0, 1, 4, 5, 6)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "0-99999999"])
def test_bad_cores_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="cpus"):
        parse_cores(text)


@pytest.mark.parametrize(("cores", "workers"), [([], 1), ([0], 0)])
def test_impossible_layouts_are_refused(cores: list[int], workers: int) -> None:
    with pytest.raises(InvalidArgumentError):
        layout_cores(cores, workers)
