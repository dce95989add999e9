"""A worker's own GPUs: what its process sets before CUDA starts, and whether its engine can use so many."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path

from splitserve.config.command_line import settings_of
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError
from splitserve.gpus.inventory import is_mig
from splitserve.gpus.rdma import PciGpu, nearest_nics, pci_gpus, read_rdma_facts
from splitserve.host_facts import read_host_facts
from splitserve.logs import log_event
from splitserve.runtime.process import DEVICE_ORDER_VARIABLE, number_devices_like_nvidia_smi

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
NICS_VARIABLE = "UCX_NET_DEVICES"
TENSOR_PARALLEL = ("--tensor-parallel-size", "-tp")
PIPELINE_PARALLEL = ("--pipeline-parallel-size", "-pp")
"""vLLM's options for the number of its ranks."""


def vllm_ranks(engine_args: str) -> int | None:
    """The ranks that `engine.engine_args` ask for, the tensor times the pipeline parallel size; None where neither is
    given.

    Raises ConfigError (field `engine.engine_args`) for a size that is no number of at least 1.
    """
    sizes = [size for size in map(partial(_size, engine_args), (TENSOR_PARALLEL, PIPELINE_PARALLEL)) if size]
    return math.prod(sizes) if sizes else None


def has_stages(engine_args: str) -> bool:
    """Whether `engine.engine_args` ask for more than one stage of a pipeline. Raises ConfigError as `vllm_ranks`."""
    return (_size(engine_args, PIPELINE_PARALLEL) or 1) > 1


def _size(engine_args: str, names: Sequence[str]) -> int | None:
    try:
        given = value_given(shlex.split(engine_args), names)
    except ValueError as error:
        raise _bad_args(str(error)) from None
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and int(given) >= 1):
        raise _bad_args(f"{names[0]} must be a number of at least 1 (given: {given[:20]!r})")
    return int(given)


def check_gpu_count(kind: str, engine_args: str, gpus: int, field: str = "gpus_per_replica") -> None:
    """Raises ConfigError naming `field` if an engine cannot use this number of GPUs: vLLM takes as many as it has
    ranks, if its options say that, the torch engine one. With 0 GPUs the engine computes on cpu."""
    if kind == "simulated" or gpus == 0:
        return
    size = vllm_ranks(engine_args) if kind == "vllm" else 1
    if size is None or size == gpus:
        return
    why = f"engine.engine_args ask for {size} ranks"
    if kind != "vllm":
        why = f"the {kind} engine computes on one GPU; engine vllm takes several"
    raise ConfigError(f"{field} is {gpus}, but {why}", field=field)


def with_tensor_parallel(engine: EngineConfig, gpus: int) -> EngineConfig:
    """The engine's settings, with vLLM's tensor parallel size for this number of GPUs unless the settings say how many
    ranks it has."""
    if engine.kind != "vllm" or gpus < 2 or vllm_ranks(engine.engine_args) is not None:
        return engine
    given = f"{engine.engine_args} --tensor-parallel-size {gpus}".strip()
    return engine.model_copy(update={"engine_args": given})


def visible_devices(own: Sequence[str], all_gpus: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES of a worker: its own GPUs first, as cuda:0, cuda:1, …, the others behind them.

    The others stay visible because `cuda_ipc` opens a peer's memory by the peer's device. A process sees only one MIG
    slice, which then stands alone.
    """
    if any(is_mig(name) for name in own):
        return ",".join(own)
    return ",".join([*own, *(name for name in all_gpus if name not in own and not is_mig(name))])


def claim_gpus(
    config: WorkerConfig, environment: MutableMapping[str, str] = os.environ, root: Path = Path("/")
) -> WorkerConfig:
    """Makes the worker's GPUs cuda:0, cuda:1, … of this process and pins its RDMA ports; returns the changed settings.

    Call it before CUDA and UCX are loaded. Raises ConfigError (field `gpus`) for a number that this process may not
    use, several MIG slices, and more GPUs than the engine computes on.
    """
    number_devices_like_nvidia_smi()
    engine = config.engine
    if config.nics == "nearest":
        _pin_nics(config.gpus, environment, root)
    if engine.kind == "vllm" and engine.device == "cpu":
        environment[VISIBLE_VARIABLE] = ""  # vLLM has no setting for its device
    if not config.gpus or engine.kind == "simulated":
        return config
    check_gpu_count(engine.kind, engine.engine_args, len(config.gpus), "gpus")
    if engine.device not in ("auto", "cuda"):
        raise _bad_gpus(f"engine.device is {engine.device}; leave it to gpus")
    if len(config.gpus) > 1 and any(is_mig(name) for name in config.gpus):
        raise _bad_gpus("CUDA shows a process only one MIG slice; give one")
    environment[DEVICE_ORDER_VARIABLE] = "PCI_BUS_ID"  # numbers are those of nvidia-smi, whatever was set
    environment[VISIBLE_VARIABLE] = visible_devices(config.gpus, _usable(config.gpus, environment, root))
    engine = with_tensor_parallel(engine, len(config.gpus)).model_copy(update={"device": "cuda:0"})
    return config.model_copy(update={"engine": engine})


def _usable(own: Sequence[str], environment: Mapping[str, str], root: Path) -> Sequence[str]:
    """The names of all GPUs that this process may use: numbers or UUIDs, as in `own`."""
    limited = environment.get(VISIBLE_VARIABLE)
    if limited is not None:
        names: Sequence[str] = [name.strip() for name in limited.split(",") if name.strip()]
        missing = [name for name in own if name not in names]
        if missing:
            raise _bad_gpus(f"{missing[0]} is not in {VISIBLE_VARIABLE} ({limited})")
        return names
    gpus = pci_gpus(root)
    if own[0].isdecimal():
        names = [str(gpu.index) for gpu in gpus] or [str(n) for n in range(read_host_facts().gpus)]
        missing = [name for name in own if names and name not in names]
        if missing:
            raise _bad_gpus(f"there is no GPU {missing[0]} here, only {', '.join(names)}")
        return names
    return [gpu.uuid for gpu in gpus if gpu.uuid]


def _pin_nics(own: Sequence[str], environment: MutableMapping[str, str], root: Path) -> None:
    """Sets UCX_NET_DEVICES unless it is set."""
    if environment.get(NICS_VARIABLE):
        return
    facts = read_rdma_facts(root)
    gpus = [gpu for gpu in facts.gpus if is_own(gpu.gpu, own)]
    chosen = nearest_nics(gpus, facts.ports)
    if chosen:
        environment[NICS_VARIABLE] = ",".join(chosen)
    log_event("worker.nics", gpus=[gpu.gpu.address for gpu in gpus], nics=chosen)


def is_own(gpu: PciGpu, own: Sequence[str]) -> bool:
    """Whether the GPU is one of `own`, by number or UUID; every GPU is if `own` is empty."""
    return not own or str(gpu.index) in own or gpu.uuid in own


def _bad_args(why: str) -> ConfigError:
    return ConfigError(f"engine.engine_args: {why}", field="engine.engine_args")


def _bad_gpus(why: str) -> ConfigError:
    return ConfigError(f"gpus: {why}", field="gpus")


def value_given(words: Sequence[str], names: Collection[str]) -> str | None:
    """The last value that is given for any of the options, as `--name value` or `--name=value`; None without one.

    `_` in an option's name reads as `-`. An option that ends the line has the value "".
    """
    given = None
    for place, word in enumerate(words):
        name, mark, value = word.partition("=")
        if name.replace("_", "-") in names:
            given = value if mark else "".join(words[place + 1 : place + 2])
    return given


_KIND, _ENGINE_ARGS = "engine.kind", "engine.engine_args"
_SETTINGS = {setting.path: setting for setting in settings_of(WorkerConfig)}
GPU_VARIABLE = _SETTINGS["gpus"].variable
"""The environment variable of a worker's setting `gpus`."""


def check_command(words: Sequence[str], environment: Mapping[str, str], gpus: int) -> None:
    """Raises ConfigError (field `gpus_per_replica`) if the engine that a worker's command line and environment choose
    cannot use this number of GPUs. Settings in a `--config` file are not considered."""
    kind = _value(_KIND, words, environment) or EngineConfig().kind
    check_gpu_count(kind, _value(_ENGINE_ARGS, words, environment) or "", gpus)


def environment_of(entries: Iterable[str]) -> dict[str, str]:
    """Variables as a mapping, of "NAME=value" entries."""
    return {name: value for name, mark, value in (entry.partition("=") for entry in entries) if mark}


def _value(path: str, words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """A setting's last value on the command line, else its variable's."""
    setting = _SETTINGS[path]
    value = value_given(words, (setting.flag,))
    return value if value is not None else environment.get(setting.variable)
