"""The way of a streamed chat request: how many files it enters, and through whose hands it goes in the coordinator."""

from __future__ import annotations

import pytest

from dev.docs.request_path import PAGE, RequestPath, documented, traced
from tests.support.clients.traffic import REPEATS

MAX_FILES = 113
MAX_HANDED_ON = 20


@pytest.fixture(scope="module")
def path() -> RequestPath:
    for _ in range(REPEATS):
        found = traced()
        if documented(PAGE.read_text(encoding="utf-8")) == found.handed_on:
            break  # else, if only by chance, messages came in another order in one of the traces
    return found


@pytest.mark.slow
def test_the_way_is_short(path: RequestPath) -> None:
    assert path.different_files <= MAX_FILES, sorted(set().union(*path.files.values()))
    assert len(path.handed_on) <= MAX_HANDED_ON, path.handed_on


def test_each_service_is_on_the_way(path: RequestPath) -> None:
    assert "coordinator/request_flow.py" in path.files["coordinator"]
    assert "prefill_worker/kv_producer.py" in path.files["prefill-worker"]
    assert "decode_worker/kv_consumer.py" in path.files["decode-worker"]


def test_the_docs_show_the_way(path: RequestPath) -> None:
    """`make docs` writes it."""
    assert documented(PAGE.read_text(encoding="utf-8")) == path.handed_on
