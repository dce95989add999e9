"""A host's GPUs, asked of the host itself: a container of the workers' image runs `splitserve.gpus.report` there."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from docker import APIClient

from autoscaler.actuators.docker_gpus import NVIDIA_VARIABLE
from autoscaler.actuators.docker_template import POOL_LABEL, PROJECT_LABEL
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.report import parse_report
from splitserve.logs import log_event

PROBE_LABEL = "splitserve.probe"
PROBE = ["python3", "-m", "splitserve.gpus.report"]


def probed_inventory(client: APIClient, project: str, replicas_per_gpu: int) -> GpuInventory | None:
    """The GPUs that the host's driver shows, none where there is no driver; None while the project has no container
    whose image could be run. Raises DockerException."""
    labels = [f"{PROJECT_LABEL}={project}", POOL_LABEL]
    workers: list[dict[str, Any]] = client.containers(all=True, filters={"label": labels})
    if not workers:
        return None
    worker = client.inspect_container(max(workers, key=lambda entry: entry["Created"])["Id"])
    create: Any = client.create_container_from_config  # not in the stubs
    made = create(probe_body(worker, project))["Id"]
    try:
        client.start(made)
        client.wait(made)
        output = client.logs(made, stderr=False).decode(errors="replace")
        failure = client.logs(made, stdout=False, tail=5).decode(errors="replace").strip()
    finally:
        client.remove_container(made, force=True, v=True)
    try:
        inventory, nics, why = parse_report(output, replicas_per_gpu)
    except ValueError as error:
        inventory, nics, why = GpuInventory(), (), failure or str(error)
    log_event(
        "host.inventory",
        level=logging.WARNING if why else logging.INFO,
        gpus=inventory.gpus,
        kinds=dict(Counter(inventory.kinds.values())),
        nvlink_pairs=sorted(sorted(pair) for pair in inventory.links),
        nics=nics,
        error=why or None,
    )
    return inventory


def probe_body(worker: dict[str, Any], project: str) -> dict[str, Any]:
    """The body of the request that creates the probe: a worker's image, with all GPUs of the host in view."""
    theirs = worker["HostConfig"]
    requests = [{**request, "Count": -1, "DeviceIDs": None} for request in theirs.get("DeviceRequests") or ()]
    runtime = {"Runtime": "nvidia"} if theirs.get("Runtime") == "nvidia" else {}
    host = {"NetworkMode": "host" if theirs["NetworkMode"] == "host" else "none", "DeviceRequests": requests}
    return {
        "Image": worker["Image"],
        "Entrypoint": PROBE,
        "Cmd": [],
        "Env": [f"{NVIDIA_VARIABLE}=all", "NVIDIA_DRIVER_CAPABILITIES=utility"],
        "Labels": {PROJECT_LABEL: project, PROBE_LABEL: "gpus"},
        "HostConfig": host | runtime | {"CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges:true"]},
    }
