"""Two Docker hosts on this machine: a network namespace and a Docker Engine each, with a cable between them to pull.

    namespace a (10.213.77.1) -- switch -- namespace b (10.213.77.2)

Everything made here is removed at the end: namespaces, daemons, mounts, folders. It needs root.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from docker import APIClient

from splitserve.security.certificates import write_certificates
from tests.support.waiting import PATIENCE_S

NAMES = ("a", "b")
ADDRESSES = {"a": "10.213.77.1", "b": "10.213.77.2"}
TLS_PORT = 2376
SWITCH = "switch"
CLONE_NEWNET = 0x40000000
MEMORY = "2g"
"""Most that both Engines may take; they take some 400 MB."""
NEEDED = ("ip", "nsenter", "mount", "dockerd", "containerd")
POLL_S = 0.1


def _run(*command: str) -> None:
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, f"{' '.join(command)}: {made.stderr}"


class Cable:
    """Three namespaces: both hosts, and the switch between them."""

    def __init__(self) -> None:
        self._prefix = f"splitserve-{os.getpid()}"

    def space(self, name: str) -> str:
        """The system's name of a namespace."""
        return f"{self._prefix}-{name}"

    def inside(self, name: str, *command: str) -> tuple[str, ...]:
        """A command that runs in a namespace. Unlike `ip netns exec` it leaves the mounts alone: dockerd needs /sys."""
        return ("nsenter", f"--net=/run/netns/{self.space(name)}", *command)

    def lay(self) -> None:
        for name in (*NAMES, SWITCH):
            _run("ip", "netns", "add", self.space(name))
            _run(*self.inside(name, "ip", "link", "set", "lo", "up"))
        _run(*self.inside(SWITCH, "ip", "link", "add", "switch", "type", "bridge"))
        _run(*self.inside(SWITCH, "ip", "link", "set", "switch", "up"))
        for name in NAMES:
            end = ("peer", "name", "eth0", "netns", self.space(name))
            _run(*self.inside(SWITCH, "ip", "link", "add", f"port-{name}", "type", "veth", *end))
            _run(*self.inside(SWITCH, "ip", "link", "set", f"port-{name}", "master", "switch", "up"))
            _run(*self.inside(name, "ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0"))
            _run(*self.inside(name, "ip", "link", "set", "eth0", "up"))

    def pull(self, name: str) -> None:
        """A host is cut off: what is sent is lost without a word."""
        _run(*self.inside(SWITCH, "ip", "link", "set", f"port-{name}", "down"))

    def plug(self, name: str) -> None:
        """It is back."""
        _run(*self.inside(SWITCH, "ip", "link", "set", f"port-{name}", "up"))

    def remove(self) -> None:
        for name in (*NAMES, SWITCH):
            with suppress(AssertionError):
                _run("ip", "netns", "delete", self.space(name))

    @asynccontextmanager
    async def door(self, name: str, port: int) -> AsyncIterator[str]:
        """An address of this machine that leads to a port of the host: a socket belongs to the namespace of the thread
        that made it."""
        maker = ThreadPoolExecutor(1, "namespace", self._enter, (name,))
        loop = asyncio.get_running_loop()

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError), await loop.run_in_executor(maker, socket.socket) as far:
                far.setblocking(False)
                await loop.sock_connect(far, (ADDRESSES[name], port))
                far_reader, far_writer = await asyncio.open_connection(sock=far)
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            maker.shutdown()

    def _enter(self, name: str) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.space(name)}", "rb") as file:
            if library.setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


class TwoHosts:
    """Both hosts. `a` answers on a socket, `b` over mutual TLS through the cable."""

    def __init__(self, cable: Cable, folder: Path) -> None:
        self.cable = cable
        self.folder = folder
        self.docker: dict[str, APIClient] = {}

    def socket(self, name: str) -> str:
        """A host's own socket, which no cable reaches."""
        return f"unix://{self.folder / name / 'docker.sock'}"

    def hosts_file(self, **settings: Any) -> dict[str, Any]:
        """What the autoscaler is told of them."""
        ports = {"first": 21000, "last": 21039}
        a = {"name": "a", "endpoint": self.socket("a"), "address": ADDRESSES["a"], "ports": ports}
        b = {
            "name": "b",
            "endpoint": f"tcp://{ADDRESSES['b']}:{TLS_PORT}",
            "tls": str(self.folder / "client"),
            "address": ADDRESSES["b"],
            "ports": ports,
        }
        return {"hosts": [a, b], **settings}

    def make_certificates(self) -> None:
        """An authority, and certificates of Engine b and of its client."""
        made, client = self.folder / "tls", self.folder / "client"
        write_certificates(made, [ADDRESSES["b"]], 1)
        client.mkdir()
        shutil.copy(made / "ca.pem", client / "ca.pem")
        shutil.copy(made / "admin.pem", client / "cert.pem")
        shutil.copy(made / "admin-key.pem", client / "key.pem")

    @contextmanager
    def engine(self, name: str) -> Iterator[None]:
        """A Docker Engine in its namespace, with a containerd of its own: containers with the host's network get that
        of the containerd that starts them."""
        home = self.folder / name
        home.mkdir()
        (home / "empty.json").write_text("{}")
        (home / "empty.toml").touch()
        address = home / "containerd.sock"
        containerd = ["containerd", "--config", home / "empty.toml", "--address", address]
        containerd += ["--root", home / "containerd", "--state", home / "containerd-run"]
        dockerd = [
            "dockerd",
            "--config-file",
            home / "empty.json",
            "--containerd",
            address,
            "-H",
            self.socket(name),
        ]
        dockerd += ["--data-root", home / "data", "--exec-root", home / "run", "--pidfile", home / "pid"]
        dockerd += ["--bridge=none", "--iptables=false", "--ip6tables=false"]
        if name == "b":
            tls = self.folder / "tls"
            dockerd += [
                "-H",
                f"tcp://{ADDRESSES['b']}:{TLS_PORT}",
                "--tlsverify",
                "--tlscacert",
                tls / "ca.pem",
            ]
            dockerd += ["--tlscert", tls / "coordinator.pem", "--tlskey", tls / "coordinator-key.pem"]
        with ExitStack() as stack:
            stack.enter_context(self._process(name, containerd, home / "containerd.log"))
            _wait(address.exists, "containerd", home / "containerd.log")
            stack.enter_context(self._process(name, dockerd, home / "dockerd.log"))
            _wait(lambda: _answers(self.socket(name)), "dockerd", home / "dockerd.log")
            self.docker[name] = APIClient(self.socket(name), version="auto")
            try:
                yield
            finally:
                self._clear(self.docker[name])

    @contextmanager
    def process(self, name: str, log: Path, *words: str, token: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A splitserve command on a host, killed at the end if it still runs."""
        command = [sys.executable, "-m", "launcher", *words]
        with self._process(name, command, log, {"SPLITSERVE_CLUSTER_TOKEN_FILE": str(token)}) as running:
            try:
                yield running
            finally:
                running.kill()  # nobody waits for its drain

    @contextmanager
    def _process(
        self, name: str, command: Sequence[object], log: Path, environment: dict[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        with log.open("ab") as file:
            process = subprocess.Popen(
                self.cable.inside(name, *map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | (environment or {}),
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _clear(self, client: APIClient) -> None:
        for container in client.containers(all=True):
            client.remove_container(container["Id"], force=True, v=True)
        client.close()


def _answers(url: str) -> bool:
    try:
        APIClient(url, version="auto", timeout=5).close()
    except Exception:
        return False
    return True


def _wait(holds: Any, what: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"{what}:\n{log.read_text(errors='replace')[-3000:]}"
        time.sleep(POLL_S)


@contextmanager
def _in_memory(folder: Path) -> Iterator[None]:
    """A file system in memory, which is gone at once: deleting an Engine's files one by one takes longer than the test.
    Mounts that the Engines leave behind go first, the deepest before the others."""
    _run("mount", "-t", "tmpfs", "-o", f"size={MEMORY},mode=0755", "hosts", str(folder))
    try:
        yield
    finally:
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((m for m in mounts if m.startswith(f"{folder}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
        _run("umount", str(folder))


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Both hosts, with Engines that have no image yet. Skips the test where they cannot be had."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if missing := [program for program in NEEDED if shutil.which(program) is None]:
        pytest.skip(f"there is no {', '.join(missing)}")
    cable = Cable()
    with ExitStack() as stack:
        # Not below the test's own folder: names of sockets have at most 107 characters.
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="hosts-")))
        stack.enter_context(_in_memory(folder))
        stack.callback(cable.remove)
        cable.lay()
        pair = TwoHosts(cable, folder)
        pair.make_certificates()
        for name in NAMES:
            stack.enter_context(pair.engine(name))
        yield pair
