"""Two Docker Engines in network namespaces, one of which is cut off and comes back: nothing is started twice, nothing
is lost, also when the autoscaler is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from autoscaler.actuators.docker_template import POOL_LABEL
from launcher.cluster.process_specs import SERVING_STATES
from splitserve.client import AsyncClient
from tests.support.cluster.streams import tokens
from tests.support.scaling.compose import FOLDER, compose_command
from tests.support.scaling.docker_rig import docker_client
from tests.support.scaling.light_image import LightImage, light_image
from tests.support.scaling.two_hosts import ADDRESSES, NAMES, TwoHosts, two_hosts
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

CUT_S = float(os.environ.get("SPLITSERVE_E2E_CUT_S", "10"))
"""A minute says no more than ten seconds, which are ten decisions; a longer cut by hand."""
POLL_S = 0.2
CLIENTS = 3
PORT = 50051
COORDINATOR = f"{ADDRESSES['a']}:{PORT}"
WORKER_PORTS = {
    "PREFILL_PORT": "50061",
    "PREFILL_METRICS_PORT": "0",
    "DECODE_PORT": "50062",
    "DECODE_METRICS_PORT": "0",
}
ENGINE = (
    "--no-prefix-cache --num-blocks 1024 --threads 1 --simulated-prefill-token-s 0.0005 "
    "--simulated-step-s 0.004 --simulated-sequence-s 0.002"
)
POOL = {"gpus_per_replica": 0, "drain_s": 10, "cold_start_s": 20}
POLICY = {
    "interval_s": 1,
    "prefill": POOL | {"min_replicas": 2, "max_replicas": 2, "target_ms": 2000},
    "decode": POOL | {"min_replicas": 3, "max_replicas": 3, "target_ms": 500},
}
pytestmark = [pytest.mark.docker, pytest.mark.timeout(LEAST_TIMEOUT_S)]


class Stage:
    """Both hosts with their workers, a coordinator and an autoscaler on the first, and what they have said."""

    def __init__(self, pair: TwoHosts, light: LightImage, folder: Path) -> None:
        self.pair, self.folder, self._light = pair, folder, light
        self.token = folder / "keys" / "cluster_token"
        self.log = folder / "autoscaler.log"
        self._stack = ExitStack()
        self._autoscaler: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Files that all share."""
        self.token.parent.mkdir()
        self.token.write_text("a-secret-that-both-hosts-share\n")
        (self.folder / "policy.yaml").write_text(yaml.safe_dump(POLICY))
        hosts = self.pair.hosts_file(answer_s=1.5, unknown_s=600)
        (self.folder / "hosts.yaml").write_text(yaml.safe_dump(hosts))
        mount = {"volumes": [f"{self._light.software}:/opt/splitserve:ro"]}
        services = dict.fromkeys(("models", "prefill", "decode"), mount)
        (self.folder / "software.yaml").write_text(yaml.safe_dump({"services": services}))
        for path in (self.folder, self.token.parent):
            path.chmod(0o755)

    async def up(self, name: str) -> None:
        """The image, and what compose starts on a host."""
        image = await asyncio.to_thread(self._light.give_to, self.pair.docker[name])
        files = ("--file", str(FOLDER / "compose.host.yaml"), "--file", str(self.folder / "software.yaml"))
        process = await asyncio.create_subprocess_exec(
            *(*compose_command(), *files, "up", "--detach", "--no-build"),
            cwd=FOLDER,
            env=os.environ | self._environment(name, image),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output = (await process.communicate())[0].decode(errors="replace")
        assert process.returncode == 0, output

    def _environment(self, name: str, image: str) -> dict[str, str]:
        return WORKER_PORTS | {
            "DOCKER_HOST": self.pair.socket(name),
            "COMPOSE_PROJECT_NAME": "splitserve",
            "COMPOSE_PROFILES": "cpu",
            "COORDINATOR_IMAGE": image,
            "WORKER_IMAGE": image,
            "KEYS": str(self.token.parent),
            "MODEL": "simulated",
            "ENGINE": "simulated",
            "PREFILL_OPTIONS": ENGINE,
            "DECODE_OPTIONS": ENGINE,
            "COORDINATORS": COORDINATOR,
            "HOST_NAME": name,
            "HOST_ADDRESS": ADDRESSES[name],
            "DRAIN_S": "10",
            "STOP_GRACE": "15s",
            "MEMLOCK": str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]),
        }

    def start_coordinator(self) -> None:
        words = ("coordinator", "--host", ADDRESSES["a"], "--grpc-port", str(PORT))
        log = self.folder / "coordinator.log"
        self._stack.enter_context(self.pair.process("a", log, *words, token=self.token))

    def start_autoscaler(self) -> None:
        words = ["autoscaler", "--actuator", "docker", "--docker-hosts", str(self.folder / "hosts.yaml")]
        words += ["--policy", str(self.folder / "policy.yaml"), "--coordinator", COORDINATOR]
        words += ["--lease", "2", "--window", "5"]
        process = self.pair.process("a", self.log, *words, token=self.token)
        self._autoscaler = self._stack.enter_context(process)

    def kill_autoscaler(self) -> None:
        assert self._autoscaler is not None
        self._autoscaler.kill()
        self._autoscaler.wait()

    def said(self, event: str) -> int:
        """How often the autoscaler has logged this."""
        return self.log.read_text(errors="replace").count(event) if self.log.exists() else 0

    def containers(self) -> dict[str, str]:
        """Workers' containers that run, with their hosts, by id. It asks the Engines past the cable."""
        return {
            entry["Id"]: name
            for name in NAMES
            for entry in self.pair.docker[name].containers(filters={"label": [POOL_LABEL]})
        }

    def close(self) -> None:
        self._stack.close()

    def logs(self) -> str:
        """The ends of all logs."""
        texts = [
            f"== {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in self.folder.glob("*.log")
        ]
        for name, docker in self.pair.docker.items():
            for entry in docker.containers(all=True):
                said = docker.logs(entry["Id"], tail=15).decode(errors="replace")
                texts.append(f"== {name} {entry['Names'][0]} {entry['Status']}\n{said}")
        return "\n".join(texts)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    main = docker_client()
    with two_hosts() as pair, light_image(main, tmp_path) as light:
        stage = Stage(pair, light, tmp_path)
        try:
            stage.prepare()
            stage.start_coordinator()
            await asyncio.gather(*(stage.up(name) for name in NAMES))
            yield stage
        except BaseException:
            print(stage.logs())
            raise
        finally:
            stage.close()
    main.close()


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(POLL_S)


async def serving(client: AsyncClient) -> Counter[str]:
    workers = (await client.server_info()).workers
    return Counter(worker.role for worker in workers if worker.state in SERVING_STATES)


async def until_serving(client: AsyncClient, **wanted: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (there := await serving(client)) != wanted:
        assert time.monotonic() < deadline, there
        await asyncio.sleep(POLL_S)


async def until_idle(client: AsyncClient) -> None:
    """No request is left anywhere, and no block: what the cut has left to writers is still held back from them."""
    deadline = time.monotonic() + PATIENCE_S
    while busy := [
        worker
        for worker in (await client.server_info()).workers
        if worker.running_requests
        or worker.waiting_requests
        or worker.free_blocks + worker.quarantined_blocks < worker.total_blocks
    ]:
        assert time.monotonic() < deadline, busy
        await asyncio.sleep(POLL_S)


async def test_a_host_that_is_cut_off_is_unknown_and_not_gone(stage: Stage) -> None:
    failures: list[str] = []
    answered: Counter[str] = Counter()
    phase, stop = "before", asyncio.Event()

    async def ask(client: AsyncClient, seed: int) -> None:
        while not stop.is_set():
            began = phase
            try:
                answer = await client.generate(tokens(64, seed), max_tokens=40)
                assert len(answer.token_ids) == 40
            except Exception as error:
                failures.append(f"{began}: {error!r}")
            answered[began] += 1
            seed += 1000

    try:
        async with stage.pair.cable.door("a", PORT) as target, AsyncClient(target) as client:
            await until_serving(client, prefill=2, decode=2)
            stage.start_autoscaler()
            # The third decode replica gets a name, ports and an address of its own.
            await until_serving(client, prefill=2, decode=3)
            before = stage.containers()
            assert Counter(before.values()) in (Counter(a=3, b=2), Counter(a=2, b=3))
            async with asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(ask(client, number))
                await until(lambda: answered["before"] > 2 * CLIENTS, "nothing is answered")
                phase = "cut"
                stage.pair.cable.pull("b")
                await until(lambda: stage.said("host.unreachable") == 1, "the cut is not noticed")
                await asyncio.sleep(CUT_S / 2)  # decisions while the host is away
                assert stage.containers() == before
                stage.kill_autoscaler()
                stage.start_autoscaler()
                await until(lambda: stage.said("HOST_UNKNOWN") > 0, "the new autoscaler orders something")
                await asyncio.sleep(CUT_S / 2)
                assert stage.containers() == before
                phase = "back"
                stage.pair.cable.plug("b")
                await until_serving(client, prefill=2, decode=3)
                await until(lambda: stage.said("host.back") > 0, "the host's return is not noticed")
                await until(lambda: answered["back"] > 2 * CLIENTS, "nothing is answered")
                await asyncio.sleep(CUT_S / 3)  # decisions with both hosts
                stop.set()
            assert stage.containers() == before
            assert not failures
            await until_idle(client)
            assert answered["cut"] > CLIENTS
    except BaseException:
        print(stage.logs())
        raise
