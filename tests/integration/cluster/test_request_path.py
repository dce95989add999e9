"""How many files one streamed chat request enters: what somebody reads who follows it."""

from __future__ import annotations

import asyncio

import pytest

from dev.docs.request_path import report, traced

MAX_FILES = 75
MAX_COORDINATOR_FILES = 40


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_streamed_chat_request_enters_few_files() -> None:
    path = await asyncio.to_thread(traced)
    print(report(path))
    assert path.different_files <= MAX_FILES
    assert len(path.files["coordinator"]) <= MAX_COORDINATOR_FILES
