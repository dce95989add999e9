"""Wrong files at running services: whatever is wrong with them, the old ones stay in force and a metric says so."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import yaml
from cryptography import x509

from coordinator.service import Coordinator, running_coordinator
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.security import TlsConfig
from splitserve.rpc.channel import make_channel
from splitserve.security.api_keys import key_hash, key_metadata, new_key
from splitserve.security.certificates import write_certificates
from splitserve.security.tls import TlsFiles, files_in
from splitserve.v1 import inference_pb2, routes_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub
from splitserve.v1.routes_pb2_grpc import RoutesServiceStub
from tests.support.cluster.fake_cluster import FakeCluster, ask, collect, fake_cluster
from tests.support.cluster.ports import free_port
from tests.support.engine.word_tokenizer import load_word_tokenizer
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

KEY = new_key()
GOOD = f"tenants:\n- name: alice\n  key_hashes: ['{key_hash(KEY)}']\n"
WRONG = {
    "a date that does not exist": "tenants:\n- name: 2026-02-30\n",
    "no YAML": "tenants: [\n",
    "a wrong type": f"{GOOD}  weight: heavy\n",
    "an unknown field": f"{GOOD}  wieght: 2\n",
    "half of it": GOOD[:30],
    "nothing": "",
    "an object": "tenants: !!python/object:os.system {}\n",
    "too many digits": f"{GOOD}  weight: {'9' * 5000}\n",
    "brackets": "tenants: " + "[" * 3000,
}


def sample(coordinator: Coordinator, name: str, file: str) -> float:
    return next(
        sample.value
        for family in coordinator.metrics()
        for sample in family.samples
        if sample.name == name
        and sample.labels.get("file") == file
        and sample.labels.get("outcome") != "adopted"
    )


async def serves_alice(cluster: FakeCluster) -> bool:
    call = cluster.client.Generate(ask(max_tokens=2), timeout=PATIENCE_S, metadata=key_metadata(KEY))
    return (await collect(call)).done is not None


@pytest.mark.slow
async def test_a_coordinator_survives_every_wrong_tenants_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(GOOD)
    async with fake_cluster(tenants=path) as cluster:
        coordinator = cluster.coordinator

        async def refuses(change: Callable[[], object]) -> None:
            before = sample(coordinator, "splitserve_file_reloads_total", "tenants")
            change()
            await settled(
                lambda: (
                    sample(coordinator, "splitserve_file_reloads_total", "tenants") > before
                    and sample(coordinator, "splitserve_file_rejected", "tenants") == 1
                )
            )
            assert await serves_alice(cluster)

        for text in WRONG.values():
            await refuses(lambda text=text: path.write_text(text))  # type: ignore[misc]
        assert "tenants.yaml, line 2" in caplog.text or "line 2" in str([r.__dict__ for r in caplog.records])
        await refuses(lambda: path.write_bytes(b"tenants: \xff\xfe"))
        await refuses(path.unlink)
        await refuses(path.mkdir)
        path.rmdir()
        path.write_text(GOOD.replace("alice", "bob"))
        await settled(lambda: sample(coordinator, "splitserve_file_rejected", "tenants") == 0)
        assert coordinator.access.tenants is not None
        assert list(coordinator.access.tenants.usages) == ["bob"]


@pytest.mark.slow
async def test_routes_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "routes.yaml"
    path.write_text("public: {words: 1}\nother: {words: 2}\n")
    async with fake_cluster(model_routes_file=path) as cluster, make_channel(cluster.address) as channel:
        routes = RoutesServiceStub(channel)

        async def in_force() -> dict[str, dict[str, float]]:
            found = await routes.GetRoutes(routes_pb2.GetRoutesRequest(), timeout=PATIENCE_S)
            return {r.route.name: {s.model: s.weight for s in r.route.shares} for r in found.routes}

        first = {"public": {"words": 1.0}, "other": {"words": 2.0}}
        assert await in_force() == first
        assert (await collect(cluster.client.Generate(ask(model="public"), timeout=PATIENCE_S))).done
        for wrong in (
            "public: {words: many}\n",
            "public: [words]\n",
            "public: {words: -1}\n",
            "- public\n",
            "[",
        ):
            path.write_text(wrong)
            before = sample(cluster.coordinator, "splitserve_file_reloads_total", "model_routes")
            await settled(
                lambda: sample(cluster.coordinator, "splitserve_file_reloads_total", "model_routes") > before  # noqa: B023
            )
            assert await in_force() == first
        path.write_text("public: {words: 3}\n")
        await settled(lambda: sample(cluster.coordinator, "splitserve_file_rejected", "model_routes") == 0)
        assert await in_force() == {"public": {"words": 3.0}}


@asynccontextmanager
async def with_tls(folder: Path, metrics_port: int) -> AsyncIterator[Coordinator]:
    settings = CoordinatorConfig(
        grpc_port=0,
        cluster_port=0,
        http_port=0,
        metrics_port=metrics_port,
        tls=TlsConfig(directory=folder),
        no_worker_wait_s=0,
    )
    async with running_coordinator(settings, load=load_word_tokenizer) as coordinator:
        yield coordinator


def shown(port: int | None, files: TlsFiles) -> int:
    """Serial number of the certificate that a server shows. Raises OSError if it does not accept ours."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(files.authority)
    assert files.certificate
    context.load_cert_chain(files.certificate, files.key)
    with (
        socket.create_connection(("127.0.0.1", port or 0), timeout=PATIENCE_S) as connection,
        context.wrap_socket(connection) as secure,
    ):
        # TLS 1.3: whether our certificate was accepted shows with the first answer.
        secure.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        secure.recv(1)
        certificate = secure.getpeercert(binary_form=True)
    assert certificate
    return x509.load_der_x509_certificate(certificate).serial_number


async def test_renewed_certificates_are_shown_by_every_server(tmp_path: Path) -> None:
    """HTTPS, metrics and gRPC; a half renewed folder and a broken one change nothing; then another authority."""
    folder, metrics_port = tmp_path / "certs", free_port()
    write_certificates(folder, ["127.0.0.1", "localhost"], 30)
    mine = tmp_path / "mine"
    shutil.copytree(folder, mine)
    files = files_in(mine, "admin")

    def serial() -> int:
        return x509.load_pem_x509_certificate((folder / "coordinator.pem").read_bytes()).serial_number

    async with with_tls(folder, metrics_port) as coordinator:
        ports = [coordinator.http_port, metrics_port]

        async def all_shown() -> set[int]:
            return {await asyncio.to_thread(shown, port, files) for port in ports}

        async def grpc_works(authority: Path) -> bool:
            async with make_channel(f"127.0.0.1:{coordinator.port}", tls=TlsFiles(authority)) as channel:
                stub = InferenceServiceStub(channel)
                try:
                    await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=PATIENCE_S)
                except grpc.aio.AioRpcError:
                    return False
                return True

        first = serial()
        assert await all_shown() == {first}
        write_certificates(tmp_path / "new", ["127.0.0.1", "localhost"], 30)
        before = sample(coordinator, "splitserve_file_reloads_total", "tls")
        shutil.copy(tmp_path / "new" / "coordinator.pem", folder)  # without its key
        await settled(lambda: sample(coordinator, "splitserve_file_reloads_total", "tls") > before)
        assert sample(coordinator, "splitserve_file_rejected", "tls") == 1
        assert await all_shown() == {first}
        assert await grpc_works(mine / "ca.pem")
        shutil.copy(mine / "coordinator.pem", folder)
        await settled(lambda: sample(coordinator, "splitserve_file_rejected", "tls") == 0)

        write_certificates(folder, ["127.0.0.1", "localhost"], 30, force=True)
        assert serial() != first
        adopted = {serial()}
        await settled_async(all_shown, adopted)
        # Another authority: its certificates are accepted, and those of the old one are not any more.
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "new", folder)
        files = files_in(tmp_path / "new", "admin")
        await settled_async(lambda: grpc_works(folder / "ca.pem"), True)
        await settled_async(all_shown, {serial()})
        of_old = TlsFiles(folder / "ca.pem", mine / "admin.pem", mine / "admin-key.pem")
        with pytest.raises(OSError, match=r"alert|unknown ca|CERTIFICATE|reset|EOF"):
            await asyncio.to_thread(shown, metrics_port, of_old)
        assert not await grpc_works(mine / "ca.pem")


async def settled_async(ask: Callable[[], object], wanted: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if await ask() == wanted:  # type: ignore[misc]
                    return
            except OSError:
                pass
            await asyncio.sleep(0.1)


def test_yaml_is_what_the_tests_think() -> None:
    with pytest.raises(ValueError, match="day is out of range"):
        yaml.safe_load(WRONG["a date that does not exist"])
