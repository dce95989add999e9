"""The forecast history over restarts: the same forecast, and files that are not used."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.policies.demand import DemandForecast, measure
from autoscaler.policies.slo.slo_tuning import SloTuning
from autoscaler.signals import history_file
from autoscaler.signals.history_file import MAX_BYTES, HistoryFile
from autoscaler.signals.observer import Observer
from autoscaler.snapshot import ArrivalBucket, Snapshot
from splitserve.errors import ConfigError
from tests.support.cluster.streams import eventually
from tests.support.scaling.signal_sources import Clock, FakeSource, worker

HISTORY_S = 1800.0
EPOCH_S = 1_700_000_000.0


class Life:
    """One life of an autoscaler on a machine whose monotonic clock began at `boot_s`."""

    def __init__(self, path: Path, wall: Clock, boot_s: float, model: str = "") -> None:
        self.wall = wall
        self.source = FakeSource("one:1", wall)
        self.actual: list[ActualReplica] = []

        async def replicas() -> list[ActualReplica]:
            return self.actual

        self.observer = Observer(
            [self.source],
            replicas,
            model=model,
            history_s=HISTORY_S,
            clock=lambda: wall.now - boot_s,
            wall_clock=wall,
        )
        self.file = HistoryFile(path, wall_clock=wall)
        self.file.restore(self.observer, HISTORY_S)

    async def look(self, after_s: float = 0.0) -> Snapshot:
        self.wall.now += after_s
        return await self.observer.observe()

    def save(self) -> None:
        self.file.save(self.observer.history())


def forecast(snapshot: Snapshot) -> DemandForecast:
    def prompts(bucket: ArrivalBucket) -> float:
        return float(bucket.uncached_tokens)

    found = measure(snapshot.arrivals, prompts, snapshot.now_s, 60.0, SloTuning())
    assert found is not None
    return found


async def grown(path: Path, wall: Clock) -> tuple[Life, Snapshot]:
    """A life of ten minutes in which the demand grows and a replica starts."""
    life = Life(path, wall, EPOCH_S - 1000)
    await life.look()
    life.actual = [ActualReplica("p-1", "prefill", False, wall.now)]
    for number in range(120):
        life.source.arrive(10 + number)
        if number == 10:
            life.source.workers = [worker("p-1", for_s=3.0)]
        snapshot = await life.look(5)
    return life, snapshot


async def test_after_a_restart_the_forecast_is_the_same(tmp_path: Path) -> None:
    path, wall = tmp_path / "history.json", Clock(EPOCH_S)
    life, before = await grown(path, wall)
    life.save()
    # Another boot of the machine: its monotonic clock has begun anew.
    again = Life(path, wall, EPOCH_S + 590)
    again.source = life.source
    after = await again.look()
    one, two = forecast(before), forecast(after)
    assert (two.slow, two.fast, two.growth) == pytest.approx((one.slow, one.fast, one.growth))
    assert two.covered_rate(40, 60, 0.9, 60) == pytest.approx(one.covered_rate(40, 60, 0.9, 60))
    assert [b.requests for b in after.arrivals] == [b.requests for b in before.arrivals]
    assert after.prefill.cold_start_s == before.prefill.cold_start_s is not None
    later = await again.look(5)
    assert len(later.arrivals) == len(before.arrivals) + 1


async def test_what_is_older_than_forecasts_look_back_is_gone(tmp_path: Path) -> None:
    path, wall = tmp_path / "history.json", Clock(EPOCH_S)
    life, _ = await grown(path, wall)
    life.save()
    wall.now += HISTORY_S - 300
    seen = await Life(path, wall, EPOCH_S).look()
    assert 0 < len(seen.arrivals) < 120
    assert min(bucket.start_s for bucket in seen.arrivals) > seen.now_s - HISTORY_S - 5


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def swapped(path: Path) -> None:
    content = json.loads(path.read_text())
    changed(path, arrivals=content["arrivals"][::-1])


def what_is_there(path: Path) -> tuple[object, ...]:
    """Without the time of access, which reading changes."""
    found = path.lstat()
    content = path.read_bytes() if path.is_file() else b""
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, content


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.write_text("prefill:\n  target_ms: 1000\n"), "holds another text"),
        (lambda path: path.write_bytes("größe: 1\n".encode("latin-1")), "holds another text"),
        (lambda path: path.write_text('{"auths": {"registry": {}}}'), "holds another JSON object"),
        (os.mkfifo, "no regular file"),
        (lambda path: path.symlink_to("/dev/null"), "no regular file"),
    ],
)
async def test_what_would_be_lost_is_refused(
    tmp_path: Path, make: Callable[[Path], object], why: str
) -> None:
    path = tmp_path / "history.json"
    make(path)
    before = what_is_there(path)
    with pytest.raises(ConfigError, match=why) as caught:
        await Life(path, Clock(EPOCH_S), EPOCH_S).look()
    assert caught.value.field == "history_file"
    assert what_is_there(path) == before


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_text("{"), "file: Invalid JSON"),
        (lambda path: path.write_bytes(b"\xff\x00"), "file: Invalid JSON"),
        (lambda path: path.write_text("[]"), "file: "),
        (lambda path: path.write_bytes(b" " * (MAX_BYTES + 1)), f"longer than {MAX_BYTES} bytes"),
        (lambda path: changed(path, version=2), "version: "),
        (lambda path: changed(path, saved_wall_s=EPOCH_S - 2000), "saved_wall_s: "),
        (lambda path: changed(path, saved_wall_s=EPOCH_S + 9000), "saved_wall_s: "),
        (lambda path: changed(path, arrivals=[[EPOCH_S, EPOCH_S + 5, 1, 1, -1, 1]]), "arrivals.0.4: "),
        (lambda path: changed(path, arrivals=[[EPOCH_S, EPOCH_S + 5, 1]]), "arrivals.0.3: "),
        (swapped, "arrivals.1: "),
        (lambda path: changed(path, cold_starts_s={"neutral": [1.0]}), "cold_starts_s.neutral"),
        (lambda path: changed(path, model="other"), "model: 'other' in the file, '' here"),
        (lambda path: (path.unlink(), path.mkdir()), "[Errno 21]"),
    ],
)
async def test_a_file_that_cannot_be_used_is_ignored_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], object], why: str
) -> None:
    path, wall = tmp_path / "history.json", Clock(EPOCH_S)
    life, _ = await grown(path, wall)
    life.save()
    spoil(path)
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(
        history_file, "log_event", lambda event, **fields: said.append((event, fields.get("error", "")))
    )
    seen = await Life(path, wall, EPOCH_S).look()
    assert seen.arrivals == ()
    assert [event for event, _ in said] == ["history.ignored"]
    assert said[0][1].startswith(why)


async def test_a_disk_that_takes_nothing_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(history_file, "log_event", lambda event, **_: said.append(event))
    life = Life(tmp_path / "nowhere" / "history.json", Clock(EPOCH_S), EPOCH_S)
    life.save()
    life.save()
    assert said == ["history.not_saved"]


async def test_a_file_that_another_writes_too_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(history_file, "log_event", lambda event, **_: said.append(event))
    path, wall = tmp_path / "history.json", Clock(EPOCH_S)
    one, other = Life(path, wall, EPOCH_S), Life(path, wall, EPOCH_S)
    one.save()
    one.save()
    path.unlink()
    one.save()
    assert not said, "a file that somebody removes is written anew"
    other.save()
    one.save()
    one.save()
    other.save()
    assert said == ["history.shared"] * 2, "by each of them"


async def test_a_folder_that_is_no_folder_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    life = Life(tmp_path / "file" / "history.json", Clock(EPOCH_S), EPOCH_S)
    life.save()
    life.save()


def names_in(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


async def test_it_is_written_again_and_again_and_at_the_end(tmp_path: Path) -> None:
    path, wall = tmp_path / "history.json", Clock(EPOCH_S)
    life = Life(path, wall, EPOCH_S)
    life.file = HistoryFile(path, save_s=0.0, wall_clock=wall)
    life.file.restore(life.observer, HISTORY_S)
    running = asyncio.create_task(life.file.run())
    await eventually(path.exists, "the file")
    await life.look()
    life.source.arrive(3)
    await life.look(5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [row[2] for row in json.loads(path.read_text())["arrivals"]] == [3]
    assert names_in(tmp_path) == [path.name], "nothing is left beside it"


async def test_a_disk_that_does_not_answer_holds_no_end_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(history_file, "LAST_SAVE_S", 0.05)
    monkeypatch.setattr(HistoryFile, "_replace", lambda _self, _history: answers.wait())
    life = Life(tmp_path / "history.json", Clock(EPOCH_S), EPOCH_S)
    running = asyncio.create_task(life.file.run())
    await asyncio.sleep(0)
    running.cancel()
    try:
        with pytest.raises(asyncio.CancelledError):
            await running
    finally:
        answers.set()
