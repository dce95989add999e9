"""What every source of spot notices must do, whatever is at its other end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from splitserve.errors import InvalidArgumentError, SplitserveError, UnavailableError
from splitserve.spot import metadata
from splitserve.spot.metadata import MAX_BODY_BYTES
from tests.support.spot.source_rigs import NOTICE_S, RIGS, Rig
from tests.support.waiting import PATIENCE_S, SLACK_S

LEFT_S = NOTICE_S
QUICK_S = 0.5


@pytest.fixture(params=list(RIGS))
async def rig(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Rig]:
    monkeypatch.setattr(
        metadata, "TIMEOUT_S", PATIENCE_S
    )  # this process may have no core for as long as the real one
    async with RIGS[request.param](tmp_path) as opened:
        yield opened


async def test_no_notice_then_one(rig: Rig) -> None:
    assert await rig.source.time_left_s() is None
    assert await rig.source.time_left_s() is None
    rig.give(LEFT_S)
    left_s = await rig.source.time_left_s()
    assert left_s is not None
    assert LEFT_S - SLACK_S < left_s <= LEFT_S


async def test_a_time_that_has_passed_is_zero(rig: Rig) -> None:
    if not rig.says_time:
        pytest.skip("it says no time")
    rig.give(-100.0)
    assert await rig.source.time_left_s() == 0.0


async def test_a_far_time_is_bounded(rig: Rig) -> None:
    if not rig.says_time:
        pytest.skip("it says no time")
    rig.give(10 * 86_400.0)
    assert await rig.source.time_left_s() == 86_400.0


@pytest.mark.parametrize("answer", [b"\xff\xfe\x00", b"[[[", b'{"a": 1}', b"soon", b"2026-99-99T00:00:00Z"])
async def test_a_malformed_answer_is_a_typed_error(rig: Rig, answer: bytes) -> None:
    rig.garble(answer)
    with pytest.raises(InvalidArgumentError):
        await rig.source.time_left_s()


@pytest.mark.parametrize("answer", [b"soon", "\u00e9".encode(), b"<html>"])
async def test_it_recovers(rig: Rig, answer: bytes) -> None:
    rig.garble(answer)
    with pytest.raises(SplitserveError):
        await rig.source.time_left_s()
    rig.mend()
    assert await rig.source.time_left_s() is None
    rig.give(LEFT_S)
    assert await rig.source.time_left_s() is not None


async def test_a_long_answer_is_not_read_to_its_end(rig: Rig) -> None:
    rig.garble(b"9" * (20 * MAX_BODY_BYTES))
    with pytest.raises(InvalidArgumentError):
        await rig.source.time_left_s()


@pytest.mark.parametrize("how", ["silent", "refusing", "overloaded", "closing"])
async def test_a_server_that_does_not_answer_is_unavailable(
    rig: Rig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rig.server is None:
        pytest.skip("it has no server")
    await rig.server.fail(how)
    monkeypatch.setattr(metadata, "TIMEOUT_S", QUICK_S)
    async with asyncio.timeout(SLACK_S):
        with pytest.raises(UnavailableError):
            await rig.source.time_left_s()


def test_the_rigs_cover_every_source() -> None:
    assert set(RIGS) == {"aws", "gcp", "azure", "file"}
