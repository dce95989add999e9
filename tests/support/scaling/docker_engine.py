"""A Docker Engine in memory: containers, their labels and states; as much of it as the actuator calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from docker.errors import APIError, ImageNotFound
from requests import Response

from autoscaler.actuators.docker_template import NUMBER_LABEL, POOL_LABEL, PROJECT_LABEL, SERVICE_LABEL

T = TypeVar("T")


class FakeDocker:
    """Calls come as through `DockerEngine.call`."""

    def __init__(self, project: str = "shop") -> None:
        self.project = project
        self.there: dict[str, dict[str, Any]] = {}
        self.killed: list[str] = []
        self.images: set[str] = set()
        self._numbers = itertools.count()
        self.refuses: dict[str, int] = {}
        """The status with which a call of this name is refused."""

    async def call(self, what: str, work: Callable[[Any], T]) -> T:
        return work(self)

    async def close(self) -> None:
        pass

    def runs(
        self, service: str, pool: str, labels: Mapping[str, str] | None = None, command: Sequence[str] = ()
    ) -> str:
        """A container that compose has started; its worker's id."""
        config = {
            "Labels": {
                PROJECT_LABEL: self.project,
                SERVICE_LABEL: service,
                NUMBER_LABEL: "1",
                POOL_LABEL: pool,
                **(labels or {}),
            },
            "Env": ["SPLITSERVE_GPU=0"],
            "Cmd": [f"{pool}-worker", *command],
            "Image": "splitserve",
            "Hostname": "",
        }
        made = self._make(
            f"{self.project}-{service}-1", config, {"NetworkMode": "none", "DeviceRequests": []}
        )
        self.there[made]["State"] = "running"
        return f"{pool}-{self.there[made]['Config']['Hostname']}"

    def runs_once(self, service: str, exit_code: int) -> str:
        """A container of no pool that has ended; its id."""
        labels = {PROJECT_LABEL: self.project, SERVICE_LABEL: service}
        made = self._make(f"{self.project}-{service}-1", {"Labels": labels, "Hostname": ""}, {})
        self.there[made] |= {"State": "exited", "ExitCode": exit_code}
        return made

    def _make(self, name: str, config: dict[str, Any], host: dict[str, Any]) -> str:
        number = next(self._numbers)
        made = f"{number:012x}" + "f" * 52
        config = config | {"Hostname": config["Hostname"] or made[:12]}
        self.there[made] = {
            "Id": made,
            "Name": f"/{name}",
            "Created": 1000.0 + number,
            "State": "created",
            "Config": config,
            "HostConfig": host,
            "NetworkSettings": {"Networks": {}},
        }
        return made

    def containers(self, all: bool, filters: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert all
        return [
            {
                "Id": made["Id"],
                "Names": [made["Name"]],
                "State": made["State"],
                "Created": made["Created"],
                "Labels": made["Config"]["Labels"],
            }
            for made in self.there.values()
            if not [one for one in filters["label"] if not _matches(made["Config"]["Labels"], one)]
        ]

    def inspect_container(self, container: str) -> dict[str, Any]:
        made = self.there[container]
        state = {"Status": made["State"], "ExitCode": made.get("ExitCode", 0), "OOMKilled": False}
        return made | {"State": state}

    def inspect_image(self, image: str) -> dict[str, Any]:
        if image not in self.images:
            raise ImageNotFound(image)
        return {"Id": image}

    def create_container_from_config(self, body: dict[str, Any], name: str) -> dict[str, str]:
        config = {key: value for key, value in body.items() if key not in ("HostConfig", "NetworkingConfig")}
        return {"Id": self._make(name, config, body["HostConfig"])}

    def start(self, container: str) -> None:
        self.there[container]["State"] = "running"

    def kill(self, container: str, signal: str = "SIGKILL") -> None:
        self._refuse("kill")
        self.killed.append(container)

    def logs(self, container: str, tail: int) -> bytes:
        self._refuse("logs")
        return b""

    def remove_container(self, container: str, v: bool) -> None:
        self._refuse("remove")
        del self.there[container]

    def _refuse(self, what: str) -> None:
        if status := self.refuses.get(what):
            raise APIError("refused", explanation="a driver's words", response=Answer(status))

    def rename(self, container: str, name: str) -> None:
        self.there[container]["Name"] = f"/{name}"


class Answer(Response):
    """An answer with this status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status_code, self.url = status, "http://engine"


def _matches(labels: Mapping[str, str], wanted: str) -> bool:
    name, mark, value = wanted.partition("=")
    return name in labels and (not mark or labels[name] == value)
