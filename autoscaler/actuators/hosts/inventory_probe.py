"""A host's GPUs, asked of the host itself: a container of the workers' image runs `splitserve.gpus.report` there."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from typing import Any

from docker import APIClient
from requests.exceptions import ReadTimeout

from autoscaler.actuators.docker_engine import may_be_gone
from autoscaler.actuators.docker_template import NVIDIA_VARIABLE, POOL_LABEL, PROJECT_LABEL
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.report import parse_report
from splitserve.logs import log_event

PROBE_LABEL = "splitserve.probe"
PROBE_S = 20
"""How long a probe may take. A driver that hangs must not hold up what else the host is asked."""
AGAIN_S = 300.0
"""How long a host whose probe hung is left alone."""
STALE_S = 60.0
"""One that is older was left by an autoscaler that was killed; a younger one may be another's."""
PROBE = ["python3", "-m", "splitserve.gpus.report"]


class GpuProbe:
    """Asks one host for its GPUs. After a probe that hung it is left alone for `AGAIN_S`."""

    def __init__(self, project: str, replicas_per_gpu: int) -> None:
        self._project, self._replicas_per_gpu = project, replicas_per_gpu
        self._not_before_s = -math.inf

    def __call__(self, client: APIClient) -> GpuInventory | None:
        """The GPUs of the host; None while it cannot be asked, or where the probe hangs. Raises DockerException."""
        if time.monotonic() < self._not_before_s:
            return None
        try:
            return probed_inventory(client, self._project, self._replicas_per_gpu)
        except ReadTimeout:
            self._not_before_s = time.monotonic() + AGAIN_S
            why = f"no answer within {PROBE_S} s; it is asked again in {AGAIN_S:g} s"
            log_event("host.inventory", level=logging.WARNING, gpus=(), error=why)
            return None


def probed_inventory(client: APIClient, project: str, replicas_per_gpu: int) -> GpuInventory | None:
    """The GPUs that the host's driver shows, none where there is no driver; None while the project has no container
    whose image could be run. Raises DockerException, and ReadTimeout for a probe that takes longer than `PROBE_S`."""
    _remove_stale(client, project)
    labels = [f"{PROJECT_LABEL}={project}", POOL_LABEL]
    workers: list[dict[str, Any]] = client.containers(all=True, filters={"label": labels})
    if not workers:
        return None
    worker = client.inspect_container(max(workers, key=lambda entry: entry["Created"])["Id"])
    create: Any = client.create_container_from_config  # not in the stubs
    made = create(probe_body(worker, project))["Id"]
    try:
        client.start(made)
        client.wait(made, timeout=PROBE_S)
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


def _remove_stale(client: APIClient, project: str) -> None:
    labels = [f"{PROJECT_LABEL}={project}", PROBE_LABEL]
    for entry in client.containers(all=True, filters={"label": labels}):
        if time.time() - entry["Created"] > STALE_S:
            with may_be_gone():
                client.remove_container(entry["Id"], force=True, v=True)


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
