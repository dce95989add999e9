"""A compose project made from compose/compose.yaml, on a real Docker Engine."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

from autoscaler.actuators.docker_template import POOL_LABEL, PROJECT_LABEL
from dev.docker_image import IMAGES
from launcher.cluster.process_specs import SERVING_STATES
from splitserve.client import AsyncClient
from splitserve.roles import POOLS
from splitserve.security.api_keys import new_key
from splitserve.v1 import inference_pb2
from tests.support.cluster.ports import free_port
from tests.support.scaling.docker_rig import docker_client

FOLDER = Path(__file__).resolve().parents[3] / "compose"
UP_S = 180.0
COMMAND_S = 120.0
POLL_S = 0.2


def compose_command() -> tuple[str, ...]:
    """Compose 2 as a plugin of `docker`, or docker-compose 1.29."""
    plugin = ("docker", "compose")
    if not shutil.which("docker"):
        return ("docker-compose",)
    answer = subprocess.run([*plugin, "version"], check=False, capture_output=True)
    return plugin if answer.returncode == 0 else ("docker-compose",)


class Compose:
    """One project. `settings` are variables of compose/.env."""

    def __init__(self, project: str, settings: Mapping[str, str]) -> None:
        self.docker = docker_client()
        self.project = project
        self.port, self.http_port = free_port(), free_port()
        self.key = new_key()
        hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        self._environment = os.environ | {
            "COMPOSE_PROJECT_NAME": project,
            "COORDINATOR_IMAGE": IMAGES["coordinator"],
            "WORKER_IMAGE": IMAGES["worker"],
            "GRPC_PORT": str(self.port),
            "HTTP_PORT": str(self.http_port),
            "SPLITSERVE_API_KEY": self.key,
            # An Engine that may not raise its own limit cannot raise a container's either.
            "MEMLOCK": str(hard),
            **settings,
        }

    async def run(self, *arguments: str) -> str:
        """Output of a compose command, which must succeed."""
        process = await asyncio.create_subprocess_exec(
            *compose_command(),
            *arguments,
            cwd=FOLDER,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        async with asyncio.timeout(COMMAND_S):
            output = (await process.communicate())[0].decode(errors="replace")
        assert process.returncode == 0, f"compose {' '.join(arguments)}:\n{output}"
        return output

    async def up(self, *options: str) -> None:
        """Starts everything and waits for the first worker of each pool."""
        await self.run("up", "--detach", "--no-build", *options)
        async with asyncio.timeout(UP_S):
            while len(await self.serving()) < len(POOLS):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)  # only the coordinator knows

    async def down(self) -> None:
        """Removes all, and fails if something of the project is left."""
        await self.run("down", "--volumes", "--timeout", "10")
        left = self.containers(pool=None)
        networks = self.docker.networks(filters={"label": f"{PROJECT_LABEL}={self.project}"})
        self.docker.close()
        assert not left, left
        assert not networks, networks

    def containers(self, pool: str | None) -> dict[str, str]:
        """Name and state of all containers of a pool, or of the whole project."""
        labels = [f"{PROJECT_LABEL}={self.project}", *([f"{POOL_LABEL}={pool}"] if pool else [])]
        found = self.docker.containers(all=True, filters={"label": labels})
        return {entry["Names"][0].removeprefix("/"): entry["State"] for entry in found}

    def container(self, service: str) -> str:
        """The name of a service's only container."""
        found = [name for name in self.containers(pool=None) if service in name]
        assert len(found) == 1, found
        return found[0]

    def addresses(self, name: str) -> set[str]:
        """What Docker's DNS says of a name inside the project, as Prometheus asks for it."""
        ask = f"import socket; print(*{{a[4][0] for a in socket.getaddrinfo({name!r}, None)}})"
        return set(self.python("coordinator", ask).split())

    def python(self, service: str, program: str) -> str:
        """What a program prints in a service's only container."""
        asked = self.docker.exec_create(self.container(service), ["python3", "-c", program])
        return str(self.docker.exec_start(asked["Id"]).decode())

    def client(self) -> AsyncClient:
        """A client with the operator's key."""
        return AsyncClient(self.target, api_key=self.key)

    async def info(self) -> inference_pb2.GetServerInfoResponse:
        """What the coordinator says."""
        async with self.client() as client:
            return await client.server_info()

    async def serving(self) -> Counter[str]:
        """Workers that serve, by pool."""
        workers = (await self.info()).workers
        return Counter(worker.role for worker in workers if worker.state in SERVING_STATES)

    @property
    def target(self) -> str:
        """The coordinator's published address."""
        return f"127.0.0.1:{self.port}"


@asynccontextmanager
async def simulated_stack(
    project: str, policy: Path, engine: str, settings: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Compose]:
    """A project with simulated engines, up and in the end down; its logs are printed where something fails.

    `engine`: options of both pools' workers.
    """
    simulated = {
        "COMPOSE_PROFILES": "cpu",
        "MODEL": "simulated",
        "ENGINE": "simulated",
        "POLICY": str(policy),
        "DRAIN_S": "20",
        "STOP_GRACE": "25s",
        "PREFILL_OPTIONS": engine,
        "DECODE_OPTIONS": engine,
        "AUTOSCALER_OPTIONS": "--window 5 --lease 5",
    }
    stack = Compose(project, {**settings, **simulated})
    try:
        await stack.up()
        yield stack
    except BaseException:
        print(await stack.run("logs", "--no-color", "--tail", "200"))
        raise
    finally:
        await stack.down()
