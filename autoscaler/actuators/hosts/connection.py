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
"""Opens a client; takes the deadline of each of its requests, in seconds. Raises DockerException or OSError."""


def connector(host: DockerHost) -> tuple[Connect, Callable[[], None]]:
    """Two functions: one connects to a host, one ends what the first began.

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
    """A client that has sent no request yet. It ignores the environment's variables for proxies and certificate
    authorities, which would replace the host's own authority."""
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
    """The remote Engine's socket as a local socket, forwarded by the system's `ssh` with its keys, its configuration
    and its known hosts. A tunnel that has ended is opened again at the next connection."""

    def __init__(self, endpoint: str, program: str = "ssh") -> None:
        self._url = urlsplit(endpoint)
        self._program = program
        self._folder = tempfile.TemporaryDirectory(prefix="splitserve-ssh-")
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self, timeout_s: float) -> APIClient:
        """A client through the tunnel. Raises DockerException with the output of `ssh` when it cannot be opened."""
        socket = Path(self._folder.name) / "docker.sock"
        if self._process is None or self._process.poll() is not None:
            self._open(socket, timeout_s)
        return _client(f"unix://{socket}", False, timeout_s)

    def close(self) -> None:
        """Ends the tunnel."""
        self._end()
        self._folder.cleanup()

    def command(self, socket: Path, timeout_s: float) -> list[str]:
        """The command that opens the tunnel."""
        options = [*SSH_OPTIONS, f"ConnectTimeout={max(1, round(timeout_s))}"]
        command = [self._program, "-nNT", *(word for option in options for word in ("-o", option))]
        command += ["-p", str(self._url.port)] if self._url.port else []
        command += ["-l", self._url.username] if self._url.username else []
        remote = self._url.path if self._url.path not in ("", "/") else REMOTE_SOCKET
        return [*command, "-L", f"{socket}:{remote}", "--", self._url.hostname or ""]

    def _open(self, socket: Path, timeout_s: float) -> None:
        socket.unlink(missing_ok=True)
        if shutil.which(self._program) is None:
            raise DockerException(f"ssh: there is no program {self._program}")
        # `launcher` ends the tunnel with this process, even a killed one: the tunnel gives root on the remote host.
        command = [*launcher(), *self.command(socket, timeout_s)]
        log_path = Path(self._folder.name) / "ssh.log"
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + timeout_s
        while not socket.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end()
                raise DockerException(f"ssh: {log_path.read_text(errors='replace').strip() or 'no answer'}")
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
