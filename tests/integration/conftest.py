"""Clusters that several integration tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from splitserve.client import AsyncClient, Client
from splitserve.errors import NotFoundError
from splitserve.models.sources import resolve_model
from tests.support.cluster.fork_server import EMBEDDED
from tests.support.cluster.forked import fork_server, stop_fork_servers
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.short_model import shortened
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="session", autouse=True)
def fork_servers() -> Iterator[None]:
    """Ends the processes that services are forked from, and fails if one of the services still runs."""
    yield
    stop_fork_servers()


@pytest.fixture(scope="module", autouse=True)
def patient_clients() -> Iterator[None]:
    """Questions about a cluster wait as long as tests do, unless they say how long: a process that has no core for
    seconds answers late. Of a module, since unit tests that run in the same process see the clients as they are."""
    with pytest.MonkeyPatch.context() as patch:
        for client in (AsyncClient, Client):
            for name in ("server_info", "models", "request_record", "request_records"):
                defaults = getattr(client, name).__kwdefaults__
                patch.setitem(defaults, "timeout_s", PATIENCE_S)
            patch.setattr(client.wait_ready, "__defaults__", (PATIENCE_S,))
        patch.setattr("splitserve.client.routes_client.TIMEOUT_S", PATIENCE_S)
        yield


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Folder of the embedded model."""
    fork_server("torch")  # imports while the test prepares its prompts
    try:
        return str(resolve_model(EMBEDDED).path)
    except NotFoundError as error:
        pytest.fail(f"{error} (`make test` does this)")


@pytest.fixture(scope="session")
def short_smollm2(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of its first layers, for tests to which the sense of answers is all the same."""
    return shortened(smollm2, tmp_path_factory.mktemp("short") / f"{EMBEDDED}-short")


@pytest.fixture(scope="module")
async def simulated_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """1P+1D of simulated engines."""
    async with running(Cluster(tmp_path_factory.mktemp("logs"))) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def otlp() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Where a test's own cluster writes its logs."""
    return tmp_path
