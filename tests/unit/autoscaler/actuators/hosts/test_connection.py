"""How Engines are reached: the tunnel of `ssh` (by a stand-in), and what is asked of a host through its Engine."""

from __future__ import annotations

import http.server
import json
import shlex
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from docker import APIClient
from docker.errors import DockerException
from requests.exceptions import ReadTimeout

from autoscaler.actuators.docker_engine import UNREACHABLE, DockerEngine
from autoscaler.actuators.hosts import inventory_probe
from autoscaler.actuators.hosts.connection import SshTunnel
from autoscaler.actuators.hosts.inventory_probe import GpuProbe, probe_body
from splitserve.errors import UnavailableError
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.report import parse_report, report
from tests.support.gpus.nvml import FakeNvml
from tests.support.waiting import PATIENCE_S

FAKE_SSH = """
import os, sys, time
if os.path.exists({refuses!r}):
    sys.exit("ops@gpu-b: Permission denied (publickey).")
near, _, far = sys.argv[sys.argv.index("-L") + 1].partition(":")
open({said!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
os.symlink({engine!r}, near)
time.sleep(600)
"""


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"Version": "1", "ApiVersion": "1.44"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "socket"

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Far:
    """A machine that a stand-in for `ssh` leads to."""

    def __init__(self, folder: Path) -> None:
        self.refuses, self.said, self.program = folder / "refuses", folder / "said", folder / "ssh"
        names = {"refuses": self.refuses, "said": self.said, "engine": folder / "engine.sock"}
        script = folder / "ssh.py"
        script.write_text(FAKE_SSH.format(**{name: str(path) for name, path in names.items()}))
        self.program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {script} "$@"\n')
        self.program.chmod(0o755)


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "engine.sock"), Answers) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield Far(tmp_path)
        server.shutdown()
        serving.join()


async def test_a_tunnel_by_ssh_that_is_opened_again(far: Far) -> None:
    tunnel = SshTunnel("ssh://ops@gpu-b:2222/run/user/1000/docker.sock", str(far.program))
    engine = DockerEngine(5.0, connect=tunnel.connect, let_go=tunnel.close)
    try:
        assert await engine.call("version", lambda client: client.version()["Version"]) == "1"
        words = far.said.read_text().split()
        assert words[-2:] == ["--", "gpu-b"]
        assert words[words.index("-p") + 1] == "2222"
        assert words[words.index("-l") + 1] == "ops"
        assert words[words.index("-L") + 1].endswith(":/run/user/1000/docker.sock")
        assert "BatchMode=yes" in words
        assert tunnel._process is not None
        tunnel._process.kill()
        tunnel._process.wait()
        far.refuses.touch()

        def lost(client: Any) -> None:
            raise DockerException("the connection is gone")

        with pytest.raises(UnavailableError):
            await engine.call("look", lost)
        with pytest.raises(UnavailableError, match="Permission denied") as caught:
            await engine.call("version", lambda client: client.version())
        assert caught.value.reason == UNREACHABLE
        far.refuses.unlink()
        assert await engine.call("version", lambda client: client.version()["Version"]) == "1"
    finally:
        await engine.close()
    assert len(far.said.read_text().splitlines()) == 2


async def test_what_is_no_engine_is_unreachable() -> None:
    """`HostWatch` takes no other errors for a host's."""
    answers: list[Any] = [{}, [], None, "x"]
    engine = DockerEngine(5.0, connect=lambda _: cast(Any, object()))
    try:
        for answer in answers:
            with pytest.raises(UnavailableError, match="not an answer of a Docker Engine") as caught:
                await engine.call("list replicas", lambda _, one=answer: one["ApiVersion"].split(".")[0])
            assert caught.value.reason == UNREACHABLE
    finally:
        await engine.close()


async def test_the_environments_proxies_do_not_apply(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere")
    tunnel = SshTunnel("ssh://gpu-b", str(far.program))
    try:
        client = tunnel.connect(5.0)
        assert not client.trust_env
        client.close()
    finally:
        tunnel.close()
    assert "-l" not in far.said.read_text().split()


def test_a_report_of_gpus_says_what_nvml_says() -> None:
    found = report(FakeNvml.of(4, [(0, 1), (2, 3)]))
    inventory, _, why = parse_report(json.dumps(found), 2)
    assert inventory.gpus == ("0", "1", "2", "3")
    assert inventory.links == frozenset({frozenset({"0", "1"}), frozenset({"2", "3"})})
    assert inventory.capacity == 8
    assert inventory.of_kind("H100").gpus == inventory.gpus
    assert why == ""


def test_a_report_without_a_driver_and_text_that_is_none() -> None:
    inventory, _, why = parse_report(
        '{"gpus": [], "links": [], "aliases": {}, "kinds": {}, "nics": ["mlx5_0:1"], "error": "x"}', 1
    )
    assert (inventory, why) == (GpuInventory(), "x")
    for text in ("", "[]", "{}", "Traceback"):
        with pytest.raises(ValueError, match=r"report|Expecting"):
            parse_report(text, 1)


def test_the_probe_sees_all_gpus_and_may_do_nothing() -> None:
    request = {"Driver": "nvidia", "Count": 0, "DeviceIDs": ["2"], "Capabilities": [["gpu"]]}
    worker = {"Image": "sha256:1", "HostConfig": {"DeviceRequests": [request], "NetworkMode": "host"}}
    body = probe_body(worker, "shop")
    assert body["HostConfig"]["DeviceRequests"] == [request | {"Count": -1, "DeviceIDs": None}]
    assert body["HostConfig"]["CapDrop"] == ["ALL"]
    assert "splitserve.pool" not in body["Labels"], "it is no replica"


class ProbedHost:
    """An Engine whose driver hangs until it is mended; as much of it as a probe asks."""

    def __init__(self) -> None:
        self.hangs = True
        self.waited: list[float] = []
        self.stale = {"Id": "stale", "Created": time.time() - 2 * inventory_probe.STALE_S}
        self.there = [self.stale, {"Id": "another's", "Created": time.time()}]

    def containers(self, all: bool, filters: dict[str, list[str]]) -> list[dict[str, Any]]:
        assert all
        return (
            list(self.there)
            if inventory_probe.PROBE_LABEL in filters["label"]
            else [{"Id": "w", "Created": 1}]
        )

    def inspect_container(self, container: str) -> dict[str, Any]:
        return {"Image": "sha256:1", "HostConfig": {"NetworkMode": "none"}}

    def create_container_from_config(self, body: dict[str, Any]) -> dict[str, str]:
        self.there.append({"Id": "probe", "Created": time.time()})
        return {"Id": "probe"}

    def start(self, container: str) -> None:
        pass

    def wait(self, container: str, timeout: float) -> None:
        self.waited.append(timeout)
        if self.hangs:
            raise ReadTimeout

    def logs(self, container: str, **which: Any) -> bytes:
        return json.dumps(report(FakeNvml.of(2, []))).encode()

    def remove_container(self, container: str, force: bool, v: bool) -> None:
        assert force
        self.there = [one for one in self.there if one["Id"] != container]


def test_a_driver_that_hangs_is_asked_again_later_and_leaves_no_probe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, probe = ProbedHost(), GpuProbe("shop", 1)
    client = cast(APIClient, host)
    assert probe(client) is None
    assert probe(client) is None
    assert host.waited == [inventory_probe.PROBE_S], "once"
    assert "no answer within" in caplog.records[-1].__dict__["event_fields"]["error"]
    assert [one["Id"] for one in host.there] == ["another's"]
    host.hangs = False
    monkeypatch.setattr(probe, "_not_before_s", 0.0)
    found = probe(client)
    assert found is not None
    assert len(found.gpus) == 2


def test_a_tunnel_ends_with_an_autoscaler_that_is_killed(far: Far) -> None:
    opens = (
        "import sys, time\n"
        "from autoscaler.actuators.hosts.connection import SshTunnel\n"
        f"tunnel = SshTunnel('ssh://gpu-b', {str(far.program)!r})\n"
        "tunnel.connect(60.0)\n"
        "print(tunnel._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", opens], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        tunnel = psutil.Process(int(owner.stdout.readline()))
        assert tunnel.is_running()
        owner.kill()
        deadline = time.monotonic() + PATIENCE_S
        while tunnel.is_running() and tunnel.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_without_the_program_ssh_it_says_so(far: Far) -> None:
    with (
        closing(SshTunnel("ssh://gpu-b", "/nowhere/ssh")) as tunnel,
        pytest.raises(DockerException, match="no program"),
    ):
        tunnel.connect(5.0)
