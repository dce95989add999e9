"""GPUs of Docker containers: which ones a container has, and how its copy gets others. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitserve.gpus.engine_command import GPU_VARIABLE, environment_of

GPU_LABEL = "splitserve.gpu"
NVIDIA_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
"""The GPUs in view, where Docker runs the container with `runtime: nvidia`."""
_NO_IDS = frozenset({"", "all", "none", "void"})


def gpus_of(inspected: Mapping[str, Any]) -> tuple[str, ...]:
    """The GPUs of a container: by its label, else those that it was given by their ids."""
    label = inspected["Config"]["Labels"].get(GPU_LABEL)
    if label:
        return tuple(str(label).split(","))
    return tuple(map(str, _given_ids(inspected["Config"], inspected["HostConfig"])))


def give_gpus(config: dict[str, Any], host: dict[str, Any], gpus: Sequence[str]) -> None:
    """Gives a container's copy these GPUs, in its label and its worker's setting.

    A template that sees all GPUs stays so, since `cuda_ipc` needs the others in view. One that was given its GPUs by
    their ids sees its own alone; Docker then numbers them from 0.
    """
    isolated = bool(_given_ids(config, host))
    host["DeviceRequests"] = [_for_gpus(request, gpus) for request in host.get("DeviceRequests") or ()]
    variables = {GPU_VARIABLE: ",".join(_numbers_inside(gpus) if isolated else gpus)}
    if _ids_of_runtime(config, host):
        variables[NVIDIA_VARIABLE] = ",".join(gpus)
    config["Labels"] = {**config["Labels"], GPU_LABEL: ",".join(gpus)}
    config["Env"] = with_variables(config.get("Env") or (), variables)


def _given_ids(config: Mapping[str, Any], host: Mapping[str, Any]) -> list[str]:
    requests = [request for request in host.get("DeviceRequests") or () if _is_for_gpus(request)]
    ids = [gpu for request in requests for gpu in request["DeviceIDs"] or ()]
    return ids or _ids_of_runtime(config, host)


def _ids_of_runtime(config: Mapping[str, Any], host: Mapping[str, Any]) -> list[str]:
    """The ids in NVIDIA_VISIBLE_DEVICES. Images of NVIDIA's set it to `all`, whichever way a container runs."""
    given = environment_of(config.get("Env") or ()).get(NVIDIA_VARIABLE, "")
    return [] if host.get("Runtime") != "nvidia" or given in _NO_IDS else given.split(",")


def _is_for_gpus(request: Mapping[str, Any]) -> bool:
    return any("gpu" in kinds for kinds in request.get("Capabilities") or ())


def _for_gpus(request: Mapping[str, Any], gpus: Sequence[str]) -> Mapping[str, Any]:
    if not _is_for_gpus(request) or request.get("Count") == -1:
        return request
    return {**request, "Count": 0, "DeviceIDs": list(gpus)}


def _numbers_inside(gpus: Sequence[str]) -> list[str]:
    return [str(number) if gpu.isdecimal() else gpu for number, gpu in enumerate(gpus)]


def with_variables(entries: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """A container's environment, "NAME=value" each, with these variables in place of its own."""
    kept = [entry for entry in entries if entry.partition("=")[0] not in variables]
    return [*kept, *(f"{name}={value}" for name, value in variables.items())]
