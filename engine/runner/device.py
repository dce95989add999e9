"""Chooses the device and the type that an engine computes in, and says why a CUDA device cannot be used."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass

import torch

from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.logs import log_event

FIELD = "engine.device"
DRIVER = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """What torch reports about CUDA.

    Versions are (major, minor). `built_for` is None for a torch without CUDA, `driver` None without a driver.
    `devices`: the number of devices that torch can use.
    """

    torch_version: str
    built_for: tuple[int, int] | None
    driver: tuple[int, int] | None
    devices: int


def read_cuda_facts(built: str | None = torch.version.cuda, library: str = DRIVER) -> CudaFacts:
    """The facts of this process. Starts CUDA where there is a driver.

    `built`: the version of CUDA that torch is built for; `library`: the driver's.
    """
    driver = _driver_version(library) if built else 0
    return CudaFacts(
        torch_version=str(torch.__version__),
        built_for=_pair(built) if built else None,
        driver=(driver // 1000, driver % 1000 // 10) if driver else None,
        devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
    )


def _driver_version(library: str) -> int:
    """The CUDA version that the driver supports, as 1000 * major + 10 * minor; 0 without a driver.

    Calls `cuDriverGetVersion` of CUDA's driver API, which torch does not expose.
    """
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # no such library, or another one
        return 0
    return version.value


def _pair(version: str) -> tuple[int, int]:
    major, minor, *_ = [*version.split("."), "0"]
    return int(major), int(minor)


def cuda_problem(facts: CudaFacts) -> str | None:
    """Why torch can use no CUDA device, in a part of a sentence; None if it can. Pure.

    A driver of an older minor version of the same toolkit's major version works, one of an older major version not.
    """
    if facts.built_for is None:
        return f"torch {facts.torch_version} was built without CUDA; install a CUDA build of it"
    if facts.driver is None:
        return "there is no NVIDIA driver; install one, and in a container NVIDIA's container toolkit"
    if facts.driver[0] < facts.built_for[0]:
        ours, theirs = (".".join(map(str, version)) for version in (facts.built_for, facts.driver))
        return f"torch {facts.torch_version} needs CUDA {ours}, the NVIDIA driver supports {theirs}; update the driver"
    if not facts.devices:
        return "the NVIDIA driver shows no device; see nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def choose_device(name: str, facts: CudaFacts | None = None) -> torch.device:
    """The device that `engine.device` names. Raises ConfigError, one sentence, for a cuda device that is not usable.

    "auto" is the cpu where no cuda device is usable; a driver that is too old is then logged as a warning.
    """
    if name == "cpu":
        return torch.device("cpu")
    facts = facts or read_cuda_facts()
    problem = cuda_problem(facts)
    if name == "auto":
        if problem is None:
            return torch.device("cuda:0")
        if facts.built_for is not None and facts.driver is not None:
            log_event("engine.device_unusable", level=logging.WARNING, why=problem, instead="cpu")
        return torch.device("cpu")
    if problem is not None:
        raise ConfigError(f"{FIELD}: {name} is not available: {problem}", field=FIELD)
    device = torch.device(name if ":" in name else f"{name}:0")
    if (device.index or 0) >= facts.devices:
        message = f"{FIELD}: {name} is not available ({facts.devices} cuda devices)"
        raise ConfigError(message, field=FIELD)
    return device


SLOW = "this processor has no instructions for bfloat16, which takes several times as long as float32"


def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor (AVX-512, AMX, AVX-NE-CONVERT, SVE). Without it torch
    multiplies element by element."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose_dtype(config: EngineConfig, device: torch.device) -> str:
    """`engine.dtype` as "float32" or "bfloat16"; "auto" is bfloat16, but float32 on a processor that does not multiply
    bfloat16."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if device.type != "cpu" or multiplies_bfloat16() else "float32"


def log_dtype(config: EngineConfig, device: torch.device, dtype: str) -> None:
    """On a processor without bfloat16, logs `engine.dtype` if float32 was chosen for it, and the warning
    `engine.slow_dtype` if bfloat16 is computed nevertheless."""
    if device.type != "cpu" or multiplies_bfloat16():
        return
    if dtype == "bfloat16":
        log_event("engine.slow_dtype", level=logging.WARNING, dtype=dtype, why=SLOW)
    elif config.dtype == "auto":
        log_event("engine.dtype", dtype=dtype, why=SLOW)
