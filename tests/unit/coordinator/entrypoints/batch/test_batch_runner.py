"""The runner of batches with a scripted door: each line once, retries, yielding, ends, faults."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from coordinator.entrypoints.batch import folder as folder_module
from coordinator.entrypoints.batch import runner as runner_module
from coordinator.entrypoints.batch.door import Answer, Door
from coordinator.entrypoints.batch.folder import BatchFolder
from coordinator.entrypoints.batch.records import Batch, Status, new_id
from coordinator.entrypoints.batch.runner import BatchRunner
from coordinator.request.inference_request import Caller
from tests.support.journal import settled

ENDPOINT = "/v1/completions"
GOOD = Answer(200, b'{"text":"x"}')
NOW = 1_000.0


def refusal(status: int, code: str, retry_after_s: float | None = 0.001) -> Answer:
    return Answer(status, json.dumps({"error": {"code": code}}).encode(), retry_after_s)


class ScriptedDoor(Door):
    """Answers as `answer` says, and counts."""

    def __init__(self) -> None:
        self.tries: Counter[str] = Counter()
        self.running = self.most_running = 0
        self.crowded = False
        self.looks = 0
        """How often somebody asked whether a line may begin."""
        self.tenants: dict[str, int | None] = {"a": None, "b": None}
        self.open = asyncio.Event()
        self.open.set()
        self.uptime = 1e9

    async def answer(self, name: str) -> Answer:
        """What the line with this prompt gets."""
        return GOOD

    @property
    @override
    def uptime_s(self) -> float:
        return self.uptime

    @override
    def caller(self, tenant: str) -> tuple[Caller, int | None] | None:
        self.looks += 1
        return (Caller(tenant), self.tenants[tenant]) if tenant in self.tenants else None

    @override
    def is_crowded(self, model: str, caller: Caller) -> bool:
        return self.crowded

    @override
    async def serve(self, endpoint: str, body: bytes, caller: Caller, request_id: str) -> Answer:
        name = json.loads(body)["prompt"]
        self.tries[name] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.open.wait()
            await asyncio.sleep(0)
            return await self.answer(name)
        finally:
            self.running -= 1


class Rig:
    """A runner over a folder."""

    def __init__(self, path: Path) -> None:
        self.folder, self.door = BatchFolder(path), ScriptedDoor()
        self.now = NOW
        self.runner = BatchRunner(self.folder, self.door, 4, 10_000, lambda: self.now)

    def add(self, count: int, tenant: str = "a", window_s: float = 86400) -> Batch:
        upload = self.folder.begin_upload(tenant)
        for number in range(count):
            line = {
                "custom_id": f"{tenant}{number}",
                "method": "POST",
                "url": ENDPOINT,
                "body": {"prompt": f"{tenant}{number}"},
            }
            self.folder.write(upload, json.dumps(line).encode() + b"\n")
        batch = Batch(
            id=new_id("batch_"),
            tenant=tenant,
            endpoint=ENDPOINT,
            input_file_id=self.folder.end_upload(upload, "f", self.now).id,
            output_file_id=new_id("file-"),
            error_file_id=new_id("file-"),
            completion_window="1h",
            created_at=int(self.now),
            expires_at=int(self.now + window_s),
        )
        self.folder.add_batch(batch)
        self.runner.added()
        return batch

    def results(self, file_id: str) -> dict[str, dict[str, Any]]:
        """Lines by their ids, each there once."""
        path = self.folder._files_at / f"{file_id}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found

    async def ended(self, batch: Batch, status: Status = "completed") -> None:
        await settled(lambda: batch.is_over)
        assert batch.status == status


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    for name in ("YIELD_S", "FIRST_PAUSE_S"):
        monkeypatch.setattr(runner_module, name, 0.002)
    monkeypatch.setattr(runner_module, "LAST_PAUSE_S", 0.02)
    made = Rig(tmp_path)
    running = asyncio.create_task(made.runner.run())
    yield made
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert made.door.running == 0
    await made.folder.close()


async def test_every_line_is_served_once_and_batches_take_turns(rig: Rig) -> None:
    batches = [rig.add(40), rig.add(30, "b")]
    for batch, count in zip(batches, (40, 30), strict=True):
        await rig.ended(batch)
        assert (batch.total, batch.completed, batch.failed) == (count, count, 0)
        assert len(rig.results(batch.output_file_id)) == count
        assert batch.shown()["error_file_id"] is None
    assert set(rig.door.tries.values()) == {1}
    assert 1 < rig.door.most_running <= 4
    metrics = {sample.labels["outcome"]: sample.value for sample in rig.runner.metrics()[1].samples}
    assert metrics == {"completed": 70, "failed": 0, "retried": 0}


async def test_refusals_for_load_are_tried_again_and_others_are_results(rig: Rig) -> None:
    firsts = {
        "a1": refusal(429, "queue_full"),
        "a2": refusal(503, "no_worker"),
        "a3": refusal(503, "draining"),
        "a4": refusal(503, "worker_lost"),
    }
    always = {
        "a5": refusal(503, "worker_lost"),
        "a6": refusal(429, "too_large", None),
        "a7": refusal(404, "model_not_found", None),
        "a8": refusal(400, "invalid_value", None),
    }

    async def answer(name: str) -> Answer:
        if name in firsts and rig.door.tries[name] <= 2:
            return firsts[name]
        if name == "a9":
            raise RuntimeError("a fault")
        return always.get(name, GOOD)

    rig.door.answer = answer  # type: ignore[method-assign]
    batch = rig.add(12)
    await rig.ended(batch)
    assert rig.results(batch.output_file_id).keys() == {"a0", "a1", "a2", "a3", "a4", "a10", "a11"}
    bad = rig.results(batch.error_file_id)
    assert {name: bad[name]["response"]["status_code"] for name in always} == {
        name: answer.status for name, answer in always.items()
    }
    assert (bad["a9"]["response"], bad["a9"]["error"]["code"]) == (None, "internal_error")
    expected = {f"a{number}": 1 for number in range(12)} | dict.fromkeys(firsts, 3) | {"a5": 3}
    assert rig.door.tries == expected


async def test_after_a_start_models_may_be_unknown_for_a_while(rig: Rig) -> None:
    async def answer(name: str) -> Answer:
        if rig.door.tries[name] < 3:
            return refusal(404, "model_not_found", None)
        rig.door.uptime = 1e9
        return GOOD

    rig.door.uptime, rig.door.answer = 0.0, answer  # type: ignore[method-assign]
    batch = rig.add(1)
    await rig.ended(batch)
    assert batch.completed == 1


async def test_no_line_begins_while_others_wait_or_the_tenant_is_gone(rig: Rig) -> None:
    rig.door.open.clear()
    batch = rig.add(20)
    await settled(lambda: rig.door.running == 1)
    rig.door.crowded = True
    rig.door.open.set()
    await settled(lambda: batch.completed == 1)
    looks = rig.door.looks
    await settled(lambda: rig.door.looks > looks + 5)
    assert (batch.completed, rig.door.running) == (1, 0)
    del rig.door.tenants["a"]
    for crowded in (True, False):
        rig.door.crowded, looks = crowded, rig.door.looks
        await settled(lambda: rig.door.looks > looks + 5)  # noqa: B023
    assert batch.completed == 1
    rig.door.tenants["a"] = 4  # half of it is the batch's
    rig.door.most_running = 0
    await rig.ended(batch)
    assert rig.door.most_running == 2
    assert set(rig.door.tries.values()) == {1}


async def test_cancelling_ends_what_runs(rig: Rig) -> None:
    batch = rig.add(10)

    async def answer(name: str) -> Answer:
        if name != "a0":
            await asyncio.Event().wait()
        return GOOD

    rig.door.answer = answer  # type: ignore[method-assign]
    await settled(lambda: rig.door.running == 2)
    assert await rig.runner.cancel(batch)
    await rig.ended(batch, "cancelled")
    assert rig.results(batch.output_file_id).keys() == {"a0"}
    assert not await rig.runner.cancel(batch)
    assert batch.times.keys() == {"in_progress_at", "cancelling_at", "cancelled_at"}


async def test_what_is_not_served_in_the_window_expires(rig: Rig) -> None:
    async def answer(name: str) -> Answer:
        return GOOD if name == "a0" else refusal(503, "no_worker")

    rig.door.answer = answer  # type: ignore[method-assign]
    batch = rig.add(10, window_s=1)
    await settled(lambda: rig.door.tries["a1"] > 1)
    rig.now += 1
    await rig.ended(batch, "expired")
    assert rig.results(batch.output_file_id).keys() == {"a0"}
    bad = rig.results(batch.error_file_id)
    assert bad.keys() == {f"a{number}" for number in range(1, 10)}
    assert {line["error"]["code"] for line in bad.values()} == {"batch_expired"}


async def test_a_full_disk_stops_a_batch_until_there_is_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rig.door.open.clear()
    batch = rig.add(6)
    await settled(lambda: rig.door.running == 1)
    with monkeypatch.context() as full:
        full.setattr(folder_module, "LEAST_FREE_BYTES", 2**62)
        rig.door.open.set()
        await settled(lambda: "batch.paused" in caplog.messages)
        assert batch.completed == 0
    await rig.ended(batch)
    assert len(rig.results(batch.output_file_id)) == 6


@pytest.mark.parametrize("damage", [b"{}\n" * 3, b"", b"\xff" * 200])
async def test_an_input_that_changes_under_a_batch_ends_this_batch_alone(rig: Rig, damage: bytes) -> None:
    rig.door.open.clear()
    batch = rig.add(3)
    await settled(lambda: rig.door.running == 1)
    (rig.folder._files_at / f"{batch.input_file_id}.jsonl").write_bytes(damage)
    rig.door.open.set()
    if damage:
        await rig.ended(batch, "failed")
        assert batch.shown()["errors"]["data"][0]["code"] == "internal_error"
    other = rig.add(3, "b")
    await rig.ended(other)
