"""Finds a host's GPUs: a container of the workers' image runs `splitserve.gpus.report` on the host."""

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
"""How long a probe may take. A driver that hangs must not delay the other calls to the host."""
AGAIN_S = 300.0
"""Pause after a probe that hung."""
STALE_S = 60.0
"""A probe's container that is older was left by a killed autoscaler; a younger one may belong to a running one."""
PROBE = ["python3", "-m", "splitserve.gpus.report"]


class GpuProbe:
    """Asks one host for its GPUs. After a probe that hung it does not ask for `AGAIN_S` seconds."""

    def __init__(self, project: str, replicas_per_gpu: int) -> None:
        self._project, self._replicas_per_gpu = project, replicas_per_gpu
        self._not_before_s = -math.inf

    def __call__(self, client: APIClient) -> GpuInventory | None:
        """The GPUs of the host; None while it cannot be asked, or when the probe hangs. Raises DockerException."""
        if time.monotonic() < self._not_before_s:
            return None
        try:
            return probed_inventory(client, self._project, self._replicas_per_gpu)
        except ReadTimeout:
            self._not_before_s = time.monotonic() + AGAIN_S
            problem = f"no answer within {PROBE_S} s; it is asked again in {AGAIN_S:g} s"
            log_event("host.inventory", level=logging.WARNING, gpus=(), error=problem)
            return None


def probed_inventory(client: APIClient, project: str, replicas_per_gpu: int) -> GpuInventory | None:
    """The GPUs that the host's driver shows; an empty inventory without a driver; None while the project has no
    container whose image could run. Raises DockerException, and ReadTimeout for a probe that takes longer than
    `PROBE_S` seconds."""
    _remove_stale(client, project)
    labels = [f"{PROJECT_LABEL}={project}", POOL_LABEL]
    workers: list[dict[str, Any]] = client.containers(all=True, filters={"label": labels})
    if not workers:
        return None
    worker = client.inspect_container(max(workers, key=lambda entry: entry["Created"])["Id"])
    create: Any = client.create_container_from_config  # not in the stubs
    probe = create(probe_body(worker, project))["Id"]
    try:
        client.start(probe)
        client.wait(probe, timeout=PROBE_S)
        output = client.logs(probe, stderr=False).decode(errors="replace")
        failure = client.logs(probe, stdout=False, tail=5).decode(errors="replace").strip()
    finally:
        client.remove_container(probe, force=True, v=True)
    try:
        inventory, nics, problem = parse_report(output, replicas_per_gpu)
    except ValueError as error:
        inventory, nics, problem = GpuInventory(), (), failure or str(error)
    log_event(
        "host.inventory",
        level=logging.WARNING if problem else logging.INFO,
        gpus=inventory.gpus,
        kinds=dict(Counter(inventory.kinds.values())),
        nvlink_pairs=sorted(sorted(pair) for pair in inventory.links),
        nics=nics,
        error=problem or None,
    )
    return inventory


def _remove_stale(client: APIClient, project: str) -> None:
    labels = [f"{PROJECT_LABEL}={project}", PROBE_LABEL]
    for entry in client.containers(all=True, filters={"label": labels}):
        if time.time() - entry["Created"] > STALE_S:
            with may_be_gone():
                client.remove_container(entry["Id"], force=True, v=True)


def probe_body(worker: dict[str, Any], project: str) -> dict[str, Any]:
    """The body of the request that creates the probe: it runs the image of `worker`, an inspected container, and sees
    all GPUs of the host."""
    of_worker = worker["HostConfig"]
    requests = [
        {**request, "Count": -1, "DeviceIDs": None} for request in of_worker.get("DeviceRequests") or ()
    ]
    runtime = {"Runtime": "nvidia"} if of_worker.get("Runtime") == "nvidia" else {}
    network = "host" if of_worker["NetworkMode"] == "host" else "none"
    host = {"NetworkMode": network, "DeviceRequests": requests}
    return {
        "Image": worker["Image"],
        "Entrypoint": PROBE,
        "Cmd": [],
        "Env": [f"{NVIDIA_VARIABLE}=all", "NVIDIA_DRIVER_CAPABILITIES=utility"],
        "Labels": {PROJECT_LABEL: project, PROBE_LABEL: "gpus"},
        "HostConfig": host | runtime | {"CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges:true"]},
    }
