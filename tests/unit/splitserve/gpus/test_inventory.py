"""The inventory: as text, and as the driver tells it."""

from __future__ import annotations

import sys

import pytest

from splitserve.config.gpu_list import MAX_GPUS, gpu_groups, gpu_names
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from splitserve.gpus.inventory import GpuInventory, is_of_kind
from splitserve.gpus.nvml import driver_inventory
from tests.support.gpus.nvml import FakeGpu, FakeNvml


def links(inventory: GpuInventory) -> set[str]:
    return {"-".join(sorted(pair)) for pair in inventory.links}


def test_lists_of_gpus() -> None:
    assert gpu_names("0, 2") == ("0", "2")
    assert gpu_names("GPU-4f5e,MIG-8-1/2/0") == ("GPU-4f5e", "MIG-8-1/2/0")
    assert gpu_groups("0,1;2,3;") == (("0", "1"), ("2", "3"))
    assert gpu_groups("") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,x", "'x' is no GPU"),
        ("0,,1", "'' is no GPU"),
        ("cuda:0", "no GPU"),
        ("1000", "no GPU"),
        ("0,1;1", "named twice"),
        ("=0", "'' is no kind"),
        ("H100\nx=0", "is no kind of GPU; write KIND=0,1"),
        ("a=b=0;;=1", "is no kind"),
        ("H100=", "no GPU is named for the kind 'H100'"),
        ("x" * 65 + "=0", "is no kind"),
        (",".join(map(str, range(MAX_GPUS + 1))), f"at most {MAX_GPUS}"),
    ],
)
def test_other_lists_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        gpu_groups(text)
    assert caught.value.field == "gpus"


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_numbered_gpus_without_links(count: int) -> None:
    nvml = FakeNvml.of(count)
    inventory = driver_inventory(library=nvml)
    assert inventory.gpus == tuple(str(n) for n in range(count))
    assert not inventory.links
    assert inventory.named(["GPU-0000"]) == ("0",)
    assert nvml.opened == 0, "the library is released"


def test_links_of_pairs_and_of_a_switch() -> None:
    pairs = driver_inventory(library=FakeNvml.of(4, [[0, 1], [2, 3]]))
    assert links(pairs) == {"0-1", "2-3"}
    switch = driver_inventory(2, FakeNvml.of(8, [range(8)]))
    assert len(switch.links) == 28
    assert switch.capacity == 16


def test_slices_stand_for_their_gpu_and_all_go_by_uuid() -> None:
    nvml = FakeNvml.of(3, [[0, 2]])
    nvml.gpus[1].slices = ["MIG-a", None, "MIG-b"]
    nvml.gpus[2].knows_mig = False
    inventory = driver_inventory(library=nvml)
    assert inventory.gpus == ("GPU-0000", "MIG-a", "MIG-b", "GPU-0002")
    assert links(inventory) == {"GPU-0000-GPU-0002"}
    assert inventory.named(["0", "2"]) == ("GPU-0000", "GPU-0002")


def test_a_gpu_in_mig_mode_without_slices_is_of_no_use() -> None:
    assert driver_inventory(library=FakeNvml([FakeGpu("GPU-a", [])])).gpus == ()


def test_without_a_driver_or_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="Driver Not Loaded") as caught:
        driver_inventory(library=FakeNvml([], driver=False))
    assert caught.value.reason == "NO_NVML"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnavailableError, match=r"splitserve\[nvml\]"):
        driver_inventory()


def test_the_library_has_the_functions_that_are_called() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in (name for name in vars(FakeNvml) if name.startswith("nvml")):
        assert callable(getattr(pynvml, name))
    from splitserve.gpus import nvml

    assert pynvml.NVML_P2P_CAPS_INDEX_NVLINK == nvml.NVLINK
    assert pynvml.NVML_P2P_STATUS_OK == nvml.STATUS_OK
    assert pynvml.NVML_DEVICE_MIG_ENABLE == nvml.MIG_ENABLED


def test_listed_kinds() -> None:
    inventory = GpuInventory.listed(" H100 = 0,1; H100=2,3;MIG 3g.40gb=MIG-a;9")
    assert inventory.gpus == ("0", "1", "2", "3", "MIG-a", "9")
    assert links(inventory) == {"0-1", "2-3"}
    assert inventory.kinds == {**dict.fromkeys("0123", "H100"), "MIG-a": "MIG 3g.40gb"}
    assert inventory.of_kind("h100").gpus == ("0", "1", "2", "3")
    assert inventory.of_kind("MIG").gpus == ("MIG-a",)
    assert inventory.of_kind("") is inventory


def test_kinds_as_the_driver_tells_them() -> None:
    nvml = FakeNvml.of(3)
    nvml.gpus[1].name = "NVIDIA L40S"
    nvml.gpus[2].slices, nvml.gpus[2].profiles = ["MIG-a", "MIG-b"], {"MIG-a": "3g.40gb"}
    inventory = driver_inventory(library=nvml)
    assert inventory.of_kind("L40S").gpus == ("GPU-0001",)
    assert inventory.of_kind("H100").gpus == ("GPU-0000",), "no slice, whatever the driver says of it"
    assert inventory.of_kind("H100 MIG").gpus == ("MIG-a", "MIG-b")
    assert inventory.of_kind("3g.40gb").gpus == ("MIG-a",)
    nvml.gpus[1].name = ""
    assert driver_inventory(library=nvml).gpus == inventory.gpus, "without a name it serves all the same"


@pytest.mark.parametrize(
    ("listed", "wanted", "words"),
    [
        ("H100=0,1;L40S=2", "B200", "none of the 3 GPUs is of the kind 'B200'; there are 2 H100, 1 L40S"),
        ("H100=0;1", "L40S", "there are 1 H100, 1 unnamed"),
        ("0,1", "H100", "their kinds are not known: list them as KIND=0,1"),
        ("L40S=0", "L40", "none of the 1 GPUs"),
        ("H100=0", "MIG 3g.40gb", "there are 1 H100"),
        ("H100=MIG-a", "H100", "none of the 1 GPUs"),
    ],
)
def test_a_kind_that_is_not_there(listed: str, wanted: str, words: str) -> None:
    with pytest.raises(FailedPreconditionError, match=words) as caught:
        GpuInventory.listed(listed).of_kind(wanted)
    assert (caught.value.reason, caught.value.field) == ("GPU_KIND", "gpu")


@pytest.mark.parametrize(
    ("wanted", "kind", "fits"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("a100 80gb", "NVIDIA A100-SXM4-80GB", True),
        ("A100 40GB", "NVIDIA A100-SXM4-80GB", False),
        ("MIG-1g.10gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", True),
        ("1g.10gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", False),
        ("H100 80GB HBM3", "H100", False),
        ("H100", "", False),
    ],
)
def test_which_names_are_of_a_kind(wanted: str, kind: str, fits: bool) -> None:
    assert is_of_kind(wanted, kind) == fits


def test_a_part_of_the_machine() -> None:
    inventory = GpuInventory.of_groups([list("0123")])
    part = inventory.restricted_to(["3", "1", "9"])
    assert part.gpus == ("3", "1")
    assert links(part) == {"1-3"}
