"""What a worker sets for its own GPUs, and how many of them its engine takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError, InvalidArgumentError
from splitserve.gpus.worker_gpus import check_command, check_gpu_count, claim_gpus, vllm_ranks
from tests.support.gpus.kernel_files import FakeMachine, two_sockets


@pytest.fixture(autouse=True)
def order_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def worker(
    gpus: str, kind: str = "torch", engine_args: str = "", device: str = "auto", **more: Any
) -> WorkerConfig:
    engine = EngineConfig(kind=kind, engine_args=engine_args, device=device)  # type: ignore[arg-type]
    return WorkerConfig(worker_id="d", model="m", gpus=gpus, engine=engine, **more)  # type: ignore[arg-type]


def machine(folder: Path, gpus: int = 4) -> Path:
    places = {f"GPU-{n}": (f"pci0000:1{n}/0000:1{n}:00.0", 0) for n in range(gpus)}
    return FakeMachine(places).write(folder)


@pytest.mark.parametrize(
    ("gpus", "visible"),
    [("2", "2,0,1,3"), ("2,3", "2,3,0,1"), ("GPU-1", "GPU-1,GPU-0,GPU-2,GPU-3"), ("MIG-a", "MIG-a")],
)
def test_own_gpus_come_first_and_the_others_stay_in_view(tmp_path: Path, gpus: str, visible: str) -> None:
    environment = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    config = claim_gpus(worker(gpus, "vllm"), environment, machine(tmp_path))
    assert environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
    assert config.engine.device == "cuda:0"


def test_what_the_process_may_not_see_stays_out_of_view(tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "1,3"}
    claim_gpus(worker("3"), environment, machine(tmp_path))
    assert environment["CUDA_VISIBLE_DEVICES"] == "3,1"
    with pytest.raises(ConfigError, match=r"gpus: 2 is not in CUDA_VISIBLE_DEVICES \(1,3\)"):
        claim_gpus(worker("2"), {"CUDA_VISIBLE_DEVICES": "1,3"}, machine(tmp_path / "again"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (worker("7"), "gpus: there is no GPU 7 here, only 0, 1, 2, 3"),
        (worker("0", device="cuda:1"), "gpus: engine.device is cuda:1"),
        (worker("0,1"), "gpus is 2, but the torch engine computes on one GPU"),
        (worker("MIG-a,MIG-b", "vllm"), "gpus: CUDA shows a process only one MIG slice"),
        (worker("0,1", "vllm", "-tp 4"), "gpus is 2, but engine.engine_args ask for 4 ranks"),
    ],
)
def test_gpus_that_cannot_be_used(tmp_path: Path, given: WorkerConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        claim_gpus(given, {}, machine(tmp_path))
    assert caught.value.field == "gpus"


@pytest.mark.parametrize(
    ("gpus", "engine_args", "becomes"),
    [
        ("0,1", "", "--tensor-parallel-size 2"),
        ("0,1", "--max-model-len 8192", "--max-model-len 8192 --tensor-parallel-size 2"),
        ("0,1", "--tensor_parallel_size=2", "--tensor_parallel_size=2"),
        ("0", "", ""),
    ],
)
def test_vllms_size_follows_from_the_gpus(tmp_path: Path, gpus: str, engine_args: str, becomes: str) -> None:
    config = claim_gpus(worker(gpus, "vllm", engine_args), {}, machine(tmp_path))
    assert config.engine.engine_args == becomes


def test_without_gpus_nothing_is_set(tmp_path: Path) -> None:
    for given in (worker(""), worker("0", "simulated")):
        environment: dict[str, str] = {}
        assert claim_gpus(given, environment, tmp_path) is given
        assert environment == {}
    environment = {}
    claim_gpus(worker("", "vllm", device="cpu"), environment, tmp_path)
    assert environment == {"CUDA_VISIBLE_DEVICES": ""}, "vLLM would take the first one"


def test_network_cards_follow_from_the_gpus(tmp_path: Path) -> None:
    root = two_sockets().write(tmp_path)
    for gpus, nics in (
        ("0", "mlx5_0:1"),
        ("GPU-b", "mlx5_1:1"),
        ("0,1", "mlx5_0:1,mlx5_1:1"),
        ("", "mlx5_0:1,mlx5_1:1"),
    ):
        environment: dict[str, str] = {}
        claim_gpus(worker(gpus, "vllm", nics="nearest"), environment, root)
        assert environment["UCX_NET_DEVICES"] == nics
    environment = {"UCX_NET_DEVICES": "eth0"}
    claim_gpus(worker("0", nics="nearest"), environment, root)
    assert environment["UCX_NET_DEVICES"] == "eth0"


def test_gpus_in_a_file_are_checked_like_text() -> None:
    assert worker([2, 3]).gpus == worker("2,3").gpus == ("2", "3")  # type: ignore[arg-type]
    assert worker(2).gpus == ("2",)  # type: ignore[arg-type]
    for wrong in (["cuda:0"], "cuda:0", [1, 1]):
        with pytest.raises(InvalidArgumentError):
            worker(wrong)  # type: ignore[arg-type]


def test_sizes_in_engine_args() -> None:
    assert vllm_ranks("") is None
    assert vllm_ranks("--max-model-len 100") is None
    assert vllm_ranks("-tp 2 --tensor-parallel-size=4") == 4
    assert vllm_ranks("--pipeline_parallel_size 3 -tp=2") == 6
    for text in ("-tp x", "-tp", "--tensor-parallel-size 0", "-tp " + "9" * 5000, "'"):
        with pytest.raises(ConfigError, match=r"engine\.engine_args: ") as caught:
            vllm_ranks(text)
        assert caught.value.field == "engine.engine_args"


def test_engines_that_take_no_gpu_are_not_asked() -> None:
    check_gpu_count("simulated", "", 4)
    check_gpu_count("torch", "", 0)
    check_gpu_count("torch", "", 1)


@pytest.mark.parametrize(
    ("words", "environment", "gpus", "fits"),
    [
        (["decode-worker", "--engine", "vllm", "--engine-args", "-tp 2"], {}, 2, True),
        (["decode-worker", "--engine=vllm", "--engine-args=-tp 2"], {}, 1, False),
        (["decode-worker", "--engine", "vllm"], {"SPLITSERVE_ENGINE_ENGINE_ARGS": "-tp 2"}, 4, False),
        (["decode-worker"], {"SPLITSERVE_ENGINE_KIND": "vllm"}, 4, True),
        (["decode-worker", "--engine", "torch"], {"SPLITSERVE_ENGINE_KIND": "vllm"}, 4, False),
        (["decode-worker"], {}, 2, False),
    ],
)
def test_the_engine_of_a_command_line(
    words: list[str], environment: dict[str, str], gpus: int, fits: bool
) -> None:
    if fits:
        check_command(words, environment, gpus)
        return
    with pytest.raises(ConfigError) as caught:
        check_command(words, environment, gpus)
    assert caught.value.field == "gpus_per_replica"
