"""Clusters that several integration tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from splitserve.errors import NotFoundError
from splitserve.models import resolve_model
from tests.support.cluster import Cluster, running

SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Folder of the embedded model."""
    try:
        return str(resolve_model(SMOLLM2).path)
    except NotFoundError as error:
        pytest.fail(f"{error} (`make test` does this)")


@pytest.fixture(scope="module")
async def simulated_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """1P+1D of simulated engines."""
    async with running(Cluster(tmp_path_factory.mktemp("logs"))) as cluster:
        yield cluster


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Where a test's own cluster writes its logs."""
    return tmp_path
