"""Connections to the Docker Engines of hosts: sockets, mutual TLS, ssh."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from docker import APIClient
from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.errors import DockerException
from docker.tls import TLSConfig

from autoscaler.actuators.hosts.inventory_file import DockerHost
from splitserve.errors import ConfigError
from splitserve.runtime.child_launch import launcher

REMOTE_SOCKET = "/var/run/docker.sock"
SSH_OPTIONS = (
    "BatchMode=yes",  # nobody is there to type a password
    "ExitOnForwardFailure=yes",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=2",
    "StreamLocalBindUnlink=yes",
)
POLL_S = 0.05
END_S = 5.0

Connect = Callable[[float], APIClient]
"""Opens a client whose requests each have this deadline, seconds. Raises DockerException or OSError."""


def connector(host: DockerHost) -> tuple[Connect, Callable[[], None]]:
    """How to connect to a host, and how to let go of it at the end.

    Raises ConfigError for TLS files that are missing.
    """
    if host.endpoint.startswith("ssh://"):
        tunnel = SshTunnel(host.endpoint)
        return tunnel.connect, tunnel.close
    return partial(_client, host.endpoint, _tls(host)), lambda: None


def _client(endpoint: str, tls: TLSConfig | bool, timeout_s: float) -> APIClient:
    with closing(_direct(endpoint, DEFAULT_DOCKER_API_VERSION, tls, timeout_s)) as first:
        version = first.version(api_version=False)["ApiVersion"]
    return _direct(endpoint, version, tls, timeout_s)


def _direct(endpoint: str, version: str, tls: TLSConfig | bool, timeout_s: float) -> APIClient:
    """A client that asks nothing yet. Variables of the environment for proxies and authorities do not apply to it: they
    would take the place of the host's own authority."""
    client = APIClient(endpoint, version=version, timeout=max(1, round(timeout_s)), tls=tls)
    client.trust_env = False
    return client


def _tls(host: DockerHost) -> TLSConfig | bool:
    if host.tls is None:
        return False
    authority, certificate, key = pems = [str(host.tls / name) for name in ("ca.pem", "cert.pem", "key.pem")]
    if missing := [pem for pem in pems if not Path(pem).is_file()]:
        raise ConfigError(f"hosts: host {host.name}: tls: there is no file {missing[0]}", field="tls")
    return TLSConfig(client_cert=(certificate, key), ca_cert=authority, verify=True)


class SshTunnel:
    """The remote Engine's socket as a socket of this machine, forwarded by the system's `ssh`, with its keys, its
    configuration and its known hosts. A tunnel that has ended is opened again at the next connection."""

    def __init__(self, endpoint: str, program: str = "ssh") -> None:
        self._url = urlsplit(endpoint)
        self._program = program
        self._folder = tempfile.TemporaryDirectory(prefix="splitserve-ssh-")
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self, timeout_s: float) -> APIClient:
        """A client through the tunnel. Raises DockerException with the words of `ssh` where there is none."""
        socket = Path(self._folder.name) / "docker.sock"
        if self._process is None or self._process.poll() is not None:
            self._open(socket, timeout_s)
        return _client(f"unix://{socket}", False, timeout_s)

    def close(self) -> None:
        """Ends it."""
        self._end()
        self._folder.cleanup()

    def command(self, socket: Path, timeout_s: float) -> list[str]:
        """The words that open the tunnel."""
        options = [*SSH_OPTIONS, f"ConnectTimeout={max(1, round(timeout_s))}"]
        words = [self._program, "-nNT", *(word for option in options for word in ("-o", option))]
        words += ["-p", str(self._url.port)] if self._url.port else []
        words += ["-l", self._url.username] if self._url.username else []
        remote = self._url.path if self._url.path not in ("", "/") else REMOTE_SOCKET
        return [*words, "-L", f"{socket}:{remote}", "--", self._url.hostname or ""]

    def _open(self, socket: Path, timeout_s: float) -> None:
        socket.unlink(missing_ok=True)
        if shutil.which(self._program) is None:
            raise DockerException(f"ssh: there is no program {self._program}")
        # It ends with this process, however that ends: nobody else would close a way to root on that host.
        command = [*launcher(), *self.command(socket, timeout_s)]
        words = Path(self._folder.name) / "ssh.log"
        with words.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + timeout_s
        while not socket.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end()
                raise DockerException(f"ssh: {words.read_text(errors='replace').strip() or 'no answer'}")
            time.sleep(POLL_S)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
