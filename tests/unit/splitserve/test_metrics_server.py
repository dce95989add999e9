"""Clients that are slow, silent or many do not keep a scrape or the server's end from happening."""

from __future__ import annotations

import socket
import ssl
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from splitserve.metrics_server import MAX_CONNECTIONS, MetricsServer
from splitserve.security.certificates import write_certificates
from splitserve.security.tls import files_in
from tests.support.waiting import PATIENCE_S

HOST = "127.0.0.1"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("answer", "An answer", registry=registry).set(42)
    return registry


def scrape(server: MetricsServer, tls: ssl.SSLContext | None = None) -> str:
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{HOST}:{server.server_port}/metrics"
    with urllib.request.urlopen(url, timeout=PATIENCE_S, context=tls) as answer:
        return str(answer.read().decode())


def connected(stack: ExitStack, server: MetricsServer) -> socket.socket:
    return stack.enter_context(socket.create_connection((HOST, server.server_port), timeout=PATIENCE_S))


def test_silent_clients_are_few_and_cut(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[threading.Timer] = []

    class Held(threading.Timer):
        """A timer that fires when the test says so."""

        def start(self) -> None:
            timers.append(self)
            ready.release()

    ready = threading.Semaphore(0)
    monkeypatch.setattr("splitserve.metrics_server.threading.Timer", Held)
    server = MetricsServer(HOST, 0, registry)
    with ExitStack() as stack:
        silent = [connected(stack, server) for _ in range(MAX_CONNECTIONS)]
        for _ in silent:
            assert ready.acquire(timeout=PATIENCE_S)
        further = connected(stack, server)
        assert further.recv(1) == b"", "one too many is closed at once"
        for timer in timers:
            timer.function()
        for connection in silent:
            assert connection.recv(1) == b"", "the silent ones are cut"
        while True:
            try:
                assert "answer 42.0" in scrape(server)
                break
            except (ConnectionError, urllib.error.URLError):
                continue  # their threads let go one after the other
        server.close()


def test_a_client_that_never_shakes_hands_delays_nobody(registry: CollectorRegistry, tmp_path: Path) -> None:
    write_certificates(tmp_path, [HOST], days=1)
    files = files_in(tmp_path, "coordinator")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert files.certificate is not None
    context.load_cert_chain(files.certificate, files.key)
    client = ssl.create_default_context(cafile=str(files.authority))
    server = MetricsServer(HOST, 0, registry, context)
    with ExitStack() as stack:
        connected(stack, server)
        assert "answer 42.0" in scrape(server, client)
        server.close()  # returns though the silent one is still connected


def test_a_broken_client_is_not_an_error_of_ours(
    registry: CollectorRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    server = MetricsServer(HOST, 0, registry)
    with ExitStack() as stack:
        garbage = connected(stack, server)
        garbage.sendall(b"\x16\x03\x01\x00\xff" + b"\0" * 300 + b"\r\n\r\n")
        while garbage.recv(4096):
            pass
        assert "answer 42.0" in scrape(server)
        server.close()
    assert "Traceback" not in capsys.readouterr().err
