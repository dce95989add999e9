"""Certificates of `splitserve certs`, checks of TLS files, and authorization by role and token."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from splitserve.config.security import TlsConfig
from splitserve.errors import (
    ConfigError,
    FailedPreconditionError,
    PermissionDeniedError,
    SplitserveError,
    UnauthenticatedError,
    UnavailableError,
)
from splitserve.rpc.credentials import ClusterCredentials, cluster_credentials, is_loopback, read_token
from splitserve.rpc.server import RpcServer
from splitserve.rpc.status import error_from_rpc
from splitserve.security.certificates import issue, make_authority, worker_files, write_certificates
from splitserve.security.tls import (
    ROLES,
    Role,
    ServerTls,
    TlsFiles,
    check_files,
    client_files,
    files_in,
    part_files,
    peer_identity,
)
from splitserve.v1 import prefill_pb2
from splitserve.v1.prefill_pb2_grpc import (
    PrefillServiceServicer,
    PrefillServiceStub,
    add_PrefillServiceServicer_to_server,
)
from tests.support.security.chains import write_chain
from tests.support.waiting import PATIENCE_S

SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name
COORDINATOR: frozenset[Role] = frozenset({"coordinator"})
TOKEN = "a-token-of-the-cluster"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("certs")
    write_certificates(folder, ["localhost", "127.0.0.1"], 30)
    return folder


class Prefill(PrefillServiceServicer):
    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        yield prefill_pb2.PrefillResponse(handoff=prefill_pb2.HandoffDone(descriptors=7))


@dataclass
class AuthorizedServer:
    """A prefill service in this process that authorizes its callers."""

    address: str

    async def call(self, caller: ClusterCredentials, peer: Role = "worker") -> SplitserveError | None:
        """Calls the service; returns the error, None on success."""
        async with caller.channel(self.address, peer) as channel:
            responses = PrefillServiceStub(channel).Prefill(
                prefill_pb2.PrefillRequest(), timeout=PATIENCE_S, metadata=caller.metadata
            )
            try:
                async for response in responses:
                    assert response.handoff.descriptors == 7
            except grpc.aio.AioRpcError as error:
                return error_from_rpc(error)
        return None


@asynccontextmanager
async def authorized_server(own: ClusterCredentials) -> AsyncIterator[AuthorizedServer]:
    server = RpcServer(authorizer=own.authorizer({SERVICE: COORDINATOR}))
    add_PrefillServiceServicer_to_server(Prefill(), server.grpc_server)
    tls = own.server_tls or (ServerTls(own.tls) if own.tls else None)
    port = await server.start("127.0.0.1", 0, [SERVICE], tls=tls)
    try:
        yield AuthorizedServer(f"127.0.0.1:{port}")
    finally:
        await server.stop()


def test_what_certs_writes(certs: Path) -> None:
    assert {path.name for path in certs.iterdir()} == {
        "ca.pem",
        "ca-key.pem",
        *(f"{role}.pem" for role in ROLES),
        *(f"{role}-key.pem" for role in ROLES),
    }
    for path in certs.glob("*-key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    names = {}
    for role in ROLES:
        certificate = x509.load_pem_x509_certificate((certs / f"{role}.pem").read_bytes())
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert found.get_values_for_type(x509.UniformResourceIdentifier) == [f"spiffe://splitserve/{role}"]
        names[role] = found.get_values_for_type(x509.DNSName)
    assert names["coordinator"] == ["coordinator.splitserve.internal", "localhost"]
    # Only the coordinator's certificate names the hosts that clients connect to.
    assert names["worker"] == ["worker.splitserve.internal"]


def test_certs_replaces_nothing_unasked_and_never_the_authority(tmp_path: Path) -> None:
    write_certificates(tmp_path, [], 30)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FailedPreconditionError, match="--force"):
        write_certificates(tmp_path, [], 30)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_certificates(tmp_path, [], 30, force=True)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after["ca.pem"] == before["ca.pem"]
    assert after["worker.pem"] != before["worker.pem"]


def test_files_of_a_folder_and_files_given(certs: Path) -> None:
    assert part_files(TlsConfig(directory=certs), "autoscaler") == files_in(certs, "autoscaler")
    own = certs / "worker.pem"
    chosen = part_files(
        TlsConfig(directory=certs, certificate=own, key=certs / "worker-key.pem"), "autoscaler"
    )
    assert chosen == TlsFiles(certs / "ca.pem", own, certs / "worker-key.pem")
    assert client_files(certs).certificate == certs / "admin.pem"
    assert client_files(certs / "ca.pem") == TlsFiles(certs / "ca.pem")


def test_wrong_files_are_named(certs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls\.authority"):
        part_files(TlsConfig(certificate=certs / "worker.pem", key=certs / "worker-key.pem"), "worker")
    with pytest.raises(ConfigError, match="cannot read"):
        part_files(TlsConfig(directory=tmp_path), "worker")
    with pytest.raises(ConfigError, match=r"tls\.certificate: .*key values mismatch"):
        part_files(TlsConfig(directory=certs, key=certs / "autoscaler-key.pem"), "worker")
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"tls\.authority"):
        client_files(tmp_path / "ca.pem")
    shutil.copytree(certs, tmp_path / "old")
    write_certificates(tmp_path / "old", [], 1, force=True, now=datetime.now(UTC) - timedelta(days=2))
    with pytest.raises(ConfigError, match="expired on"):
        part_files(TlsConfig(directory=tmp_path / "old"), "worker")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a worker whose certificate has an intermediate one between it and the authority."""
    return write_chain(tmp_path_factory.mktemp("chain"))


def test_a_chain_with_an_intermediate_certificate_is_whole(chain: Path) -> None:
    check_files(files_in(chain, "worker"))
    # An authority may be the intermediate one: nothing above it counts.
    check_files(TlsFiles(chain / "inner.pem", chain / "worker.pem", chain / "worker-key.pem"))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"inner": (-10, -2)}, r"worker\.pem: CN=inner expired on 20"),
        ({"inner": (2, 10)}, r"worker\.pem: CN=inner is not valid before 20"),
        ({"leaf": (2, 10)}, r"worker\.pem: CN=worker is not valid before 20"),
        ({"leaf": (-10, -2)}, r"worker\.pem: CN=worker expired on 20"),
        ({"root": (-10, -2)}, r"worker\.pem: CN=root expired on 20"),
        (
            {"sent": ("leaf",)},
            r"the certificate of CN=inner, which signed CN=worker, is neither in this file nor in",
        ),
        ({"sent": ("leaf", "root")}, "the certificate of CN=inner, which signed CN=worker"),
        ({"trusted": "other"}, "the certificate of CN=root, which signed CN=inner"),
        ({"trusted": "namesake"}, "the certificate of CN=root, which signed CN=inner"),
        (
            {"trusted": "namesake", "sent": ("leaf", "inner", "root")},
            r"CN=root is signed by itself, and is not in .*ca\.pem",
        ),
        ({"key": "other"}, "key values mismatch"),
    ],
)
def test_what_is_wrong_in_a_chain_is_named(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    write_chain(tmp_path, **changed)
    with pytest.raises(ConfigError, match=why) as caught:
        ServerTls(files_in(tmp_path, "worker"))
    assert caught.value.field == "tls.certificate"
    assert str(tmp_path / "worker.pem") in caught.value.message


def test_of_a_renewed_intermediate_certificate_the_valid_one_counts(tmp_path: Path) -> None:
    write_chain(tmp_path, renewed=True, inner=(-10, -2))
    check_files(files_in(tmp_path, "worker"))


@pytest.mark.parametrize("name", ["ca.pem", "autoscaler.pem", "autoscaler-key.pem"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(certs: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(certs, tmp_path / "certs")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match="no regular file"):
        check_files(files_in(folder, "autoscaler"))


async def test_only_the_right_role_gets_through(certs: Path) -> None:
    def part(role: Role) -> ClusterCredentials:
        return ClusterCredentials(files_in(certs, role))

    async with authorized_server(part("worker")) as worker:
        assert await worker.call(part("coordinator")) is None
        for role in ("autoscaler", "worker", "admin", "client"):
            error = await worker.call(part(role))  # type: ignore[arg-type]
            assert isinstance(error, PermissionDeniedError)
            assert error.reason == "WRONG_ROLE"
            assert role in error.message
        # The caller verifies the server's role as well.
        error = await worker.call(part("coordinator"), peer="autoscaler")
        assert isinstance(error, UnavailableError)
        assert error.reason == "TLS_FAILED"


async def test_no_wrong_or_expired_certificate(certs: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path / "other", [], 30)
    shutil.copytree(certs, tmp_path / "old")
    write_certificates(tmp_path / "old", [], 1, force=True, now=datetime.now(UTC) - timedelta(days=2))
    foreign = files_in(tmp_path / "other", "coordinator")
    strangers: dict[str, ClusterCredentials] = {
        "no TLS": ClusterCredentials(),
        "no certificate": ClusterCredentials(TlsFiles(certs / "ca.pem")),
        "another authority": ClusterCredentials(TlsFiles(certs / "ca.pem", foreign.certificate, foreign.key)),
        "expired": ClusterCredentials(files_in(tmp_path / "old", "coordinator")),
    }
    async with authorized_server(ClusterCredentials(files_in(certs, "worker"))) as worker:
        for stranger in strangers.values():
            assert isinstance(await worker.call(stranger), UnavailableError)
        # A client that trusts another authority refuses this server.
        error = await worker.call(ClusterCredentials(foreign))
        assert isinstance(error, UnavailableError)
        assert error.reason == "TLS_FAILED"


async def test_renewed_files_are_used_without_a_restart(certs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    shutil.copytree(certs, folder)
    files = files_in(folder, "worker")
    tls = ServerTls(files)
    async with authorized_server(ClusterCredentials(files, server_tls=tls)) as worker:
        caller = ClusterCredentials(files_in(certs, "coordinator"))
        assert await worker.call(caller) is None
        shutil.rmtree(folder)
        assert not tls.file.reload()  # in between: what is in force stays
        assert await worker.call(caller) is None
        write_certificates(folder, [], 30)
        assert tls.file.reload()
        assert isinstance(await worker.call(caller), UnavailableError)
        assert await worker.call(ClusterCredentials(files_in(folder, "coordinator"))) is None


async def test_the_cluster_token(certs: Path) -> None:
    async with authorized_server(ClusterCredentials(token=TOKEN)) as worker:
        assert await worker.call(ClusterCredentials(token=TOKEN)) is None
        for token in (None, "another-token-of-16", TOKEN + "x", TOKEN[:-1]):
            error = await worker.call(ClusterCredentials(token=token))
            assert isinstance(error, UnauthenticatedError)
            assert error.reason == "CLUSTER_TOKEN"
            assert TOKEN not in error.message
    both = ClusterCredentials(files_in(certs, "worker"), TOKEN)
    async with authorized_server(both) as worker:
        assert await worker.call(ClusterCredentials(files_in(certs, "coordinator"), TOKEN)) is None
        error = await worker.call(ClusterCredentials(files_in(certs, "coordinator")))
        assert isinstance(error, UnauthenticatedError)


def test_tokens_of_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("SPLITSERVE_CLUSTER_TOKEN", "token-of-the-environment")
    assert cluster_credentials("worker", None, path).token == TOKEN
    assert read_token(None) == "token-of-the-environment"
    assert TOKEN not in repr(cluster_credentials("worker", None, path))
    for text in ("short", "ünïcödé-ünïcödé-ünïcödé", "", "x" * 1025):
        path.write_text(text)
        with pytest.raises(ConfigError, match="16 to 1024") as caught:
            read_token(path)
        assert not text or text not in caught.value.message
    monkeypatch.delenv("SPLITSERVE_CLUSTER_TOKEN")
    assert read_token(None) is None


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("host.example", False)],
)
def test_what_counts_as_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def test_the_authority_signs_no_authorities() -> None:
    now = datetime.now(UTC)
    authority = make_authority(now)
    certificate = issue(authority, "worker", [], now, 1).certificate
    check: Callable[[x509.Certificate], None] = certificate.verify_directly_issued_by
    check(authority.certificate)
    basic = authority.certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (basic.ca, basic.path_length) == (True, 0)


def test_a_worker_s_own_certificate(tmp_path: Path) -> None:
    written = write_certificates(tmp_path, [], 30, workers=["decode-0"])
    assert worker_files(tmp_path, "decode-0").certificate in written
    certificate = x509.load_pem_x509_certificate((tmp_path / "worker-decode-0.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert uris == ["spiffe://splitserve/worker/decode-0"]
    assert names.get_values_for_type(x509.DNSName) == ["worker.splitserve.internal"]


@pytest.mark.parametrize(
    ("names", "may", "may_not"),
    [
        (["spiffe://splitserve/decode"], [("decode", "a"), ("decode", "b")], [("prefill", "a")]),
        (
            ["spiffe://splitserve/decode/a"],
            [("decode", "a")],
            [("decode", "b"), ("prefill", "a"), ("decode", "")],
        ),
        (
            ["spiffe://splitserve/decode", "spiffe://splitserve/decode/a"],
            [("decode", "a")],
            [("decode", "b")],
        ),
        (
            ["spiffe://splitserve/prefill/a", "spiffe://splitserve/decode"],
            [("decode", "b")],
            [("prefill", "b")],
        ),
        (["spiffe://splitserve/decode/"], [], [("decode", "a")]),
        (["spiffe://elsewhere/decode", "decode.splitserve.internal", "decode"], [], [("decode", "a")]),
        ([], [], [("decode", "a")]),
    ],
)
def test_whose_certificate_it_is(
    names: list[str], may: list[tuple[str, str]], may_not: list[tuple[str, str]]
) -> None:
    class Call:
        def auth_context(self) -> dict[str, list[bytes]]:
            return {"x509_subject_alternative_name": [name.encode() for name in names]}

    call: Any = Call()
    identity = peer_identity(call)
    assert all(identity.may_be(role, worker_id) for role, worker_id in may)
    assert not any(identity.may_be(role, worker_id) for role, worker_id in may_not)
